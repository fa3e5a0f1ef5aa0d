"""The schema as a whole: made twice, privileges as they are written down, names that are promised."""

from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from fleetward.controller.store import faults, migrate
from fleetward.controller.store.migrate import Role
from fleetward.domain.access import ALL_SCOPES
from fleetward.domain.errors import SchemaVersion, ServiceRoleTooStrong
from fleetward.domain.workspaces import BuildReason, Transition
from tests.fix_database import Clone, Server
from tests.store.rows import one

PRIVILEGES = Path(__file__).with_name("privileges.txt")
SERVICE_ROLES = ("fleetward_app", "fleetward_ro", "fleetward_seal")


def test_making_it_twice_changes_nothing(postgres: Server):
    name = "made_twice"
    first = migrate.init_cluster(postgres.url(), database=name)
    try:
        assert migrate.init_cluster(postgres.url(), database=name) == first
        assert migrate.migrate(postgres.url(database=name)) == []
        migrate.check_service(first)
    finally:
        postgres.drop(name)


def test_passwords_are_set_as_verifiers_and_open_the_url(postgres: Server):
    name = "with_passwords"
    url = migrate.init_cluster(postgres.url(), database=name, passwords={Role.APP: "it's a secret"})
    try:
        with psycopg.connect(postgres.url()) as connection:
            stored = one(connection, "SELECT rolpassword FROM pg_authid WHERE rolname = 'fleetward_app'")
            connection.execute("ALTER ROLE fleetward_app PASSWORD NULL")
        assert stored.startswith("SCRAM-SHA-256$")
        assert conninfo_to_dict(url)["password"] == "it's a secret"
    finally:
        postgres.drop(name)


def test_an_admin_without_superuser_rights_can_make_it(postgres: Server):
    name = "by_an_admin"
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("CREATE ROLE an_admin LOGIN CREATEROLE CREATEDB")
        # The roles were made by another; their maker would have this.
        for role in (migrate.OWNER, *(role.login for role in Role)):
            connection.execute(sql.SQL("GRANT {} TO an_admin WITH ADMIN OPTION").format(sql.Identifier(role)))
    try:
        migrate.init_cluster(postgres.url(user="an_admin"), database=name)
        migrate.check_service(migrate.url_for(postgres.url(), Role.APP, database=name))
    finally:
        postgres.drop(name)
        with psycopg.connect(postgres.url(), autocommit=True) as connection:
            connection.execute("DROP OWNED BY an_admin")
            connection.execute("DROP ROLE an_admin")


@pytest.mark.parametrize("role", [Role.OWNER, Role.MIGRATE])
def test_the_service_refuses_a_role_that_is_too_strong(clone: Clone, role: Role):
    with pytest.raises(ServiceRoleTooStrong, match="owns the tables"):
        migrate.check_service(clone.url(role))


def test_the_service_refuses_a_superuser(clone: Clone):
    with pytest.raises(ServiceRoleTooStrong, match="is a superuser") as refused:
        migrate.check_service(clone.admin_url)
    assert "may switch triggers off" in refused.value.message
    assert "db init" in refused.value.hint


def _as_owner(clone: Clone, statement: str) -> None:
    with clone.connect(Role.OWNER) as connection:
        connection.execute(statement.encode())


def test_a_newer_schema_is_refused(clone: Clone):
    _as_owner(clone, "INSERT INTO app.schema_migrations VALUES (9999, '9999_future.sql', 'x')")
    for refuse in (migrate.check_service, lambda _: migrate.migrate(clone.admin_url)):
        with pytest.raises(SchemaVersion, match=r"9999_future\.sql"):
            refuse(clone.url())


def test_an_edited_migration_is_refused(clone: Clone):
    _as_owner(clone, "UPDATE app.schema_migrations SET sha256 = 'x' WHERE number = 3")
    with pytest.raises(SchemaVersion, match=r"0003_fleet\.sql"):
        migrate.migrate(clone.admin_url)


def test_a_schema_that_lacks_migrations_is_refused_by_the_service(clone: Clone):
    _as_owner(clone, "DELETE FROM app.schema_migrations WHERE number = 10")
    with pytest.raises(SchemaVersion, match=r"0010_privileges\.sql") as refused:
        migrate.check_service(clone.url())
    assert "db migrate" in refused.value.hint


def test_privileges_are_those_that_are_written_down(owner):
    """The failure prints the whole file to keep, once each line of the difference is wanted."""
    rows = owner.execute(
        """
        SELECT grantee || ' ' || table_schema || '.' || table_name || ' ' || privilege_type || ' '
            || string_agg(column_name, ' ' ORDER BY column_name COLLATE "C")
        FROM information_schema.column_privileges
        WHERE grantee = ANY (%s) AND table_schema IN ('public', 'app')
        GROUP BY grantee, table_schema, table_name, privilege_type
        """,
        [list(SERVICE_ROLES)],
    ).fetchall()
    tables = owner.execute(
        """
        SELECT grantee || ' ' || table_schema || '.' || table_name || ' ' || privilege_type
        FROM information_schema.table_privileges
        WHERE grantee = ANY (%s) AND table_schema IN ('public', 'app')
          AND privilege_type NOT IN ('SELECT', 'INSERT', 'UPDATE')
        """,
        [list(SERVICE_ROLES)],
    ).fetchall()
    found = "".join(f"{line}\n" for line in sorted(row[0] for row in [*rows, *tables]))
    assert found == PRIVILEGES.read_text(), found


def test_the_public_may_nothing(owner):
    rows = owner.execute(
        "SELECT table_name, privilege_type FROM information_schema.table_privileges"
        " WHERE grantee = 'PUBLIC' AND table_schema IN ('public', 'app')"
    ).fetchall()
    assert rows == []
    loose = owner.execute(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'app'::regnamespace"
        " AND (proacl IS NULL OR EXISTS (SELECT FROM aclexplode(proacl) AS granted WHERE granted.grantee = 0))"
    ).fetchall()
    assert loose == []


def test_readers_see_no_hashes_and_no_pairing_rows(shared_clone: Clone):
    with shared_clone.connect(Role.RO) as reader:
        for statement in (
            "SELECT key_hash FROM api_keys",
            "SELECT password_hash FROM users",
            "SELECT id FROM node_pairing_codes",
            "SELECT reply FROM idempotency_keys",
            "SELECT secret_enc FROM webhooks",
            "INSERT INTO jobs (kind) VALUES ('command')",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege), reader.transaction():
                reader.execute(statement.encode())
        assert reader.execute("SELECT count(*) FROM jobs").fetchone() is not None


@pytest.mark.parametrize(
    ("name", "values"),
    [("api_key_scope", ALL_SCOPES), ("build_reason", BuildReason), ("workspace_transition", Transition)],
)
def test_the_enums_are_the_domains_words(app, name, values):
    rows = app.execute(
        "SELECT enumlabel FROM pg_enum WHERE enumtypid = to_regtype(%s) ORDER BY enumsortorder", [name]
    ).fetchall()
    assert [row[0] for row in rows] == [str(value) for value in values]


def test_no_other_enum_is_there(app):
    rows = app.execute("SELECT typname FROM pg_type WHERE typtype = 'e' ORDER BY typname").fetchall()
    assert rows == [("api_key_scope",), ("build_reason",), ("workspace_transition",)]


def test_every_table_and_function_says_what_it_is_for(app):
    silent = app.execute(
        """
        SELECT oid::regclass::text FROM pg_class
        WHERE relkind = 'r' AND relnamespace IN ('public'::regnamespace, 'app'::regnamespace)
          AND obj_description(oid, 'pg_class') IS NULL
        UNION ALL
        SELECT oid::regprocedure::text FROM pg_proc
        WHERE pronamespace = 'app'::regnamespace AND obj_description(oid, 'pg_proc') IS NULL
        """
    ).fetchall()
    assert silent == []


def test_indexes_named_in_the_contract_are_there_and_as_promised(app):
    found = dict(app.execute("SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'").fetchall())
    promised = {
        "job_assignments_open_per_node": "UNIQUE INDEX job_assignments_open_per_node ON public.job_assignments USING"
        " btree (job_id, node_id) WHERE (state = ANY (ARRAY['assigned'::text, 'running'::text, 'succeeded'::text]))",
        "job_assignments_by_node": "INDEX job_assignments_by_node ON public.job_assignments USING btree"
        " (node_id, state)",
        "job_assignments_by_job": "INDEX job_assignments_by_job ON public.job_assignments USING btree (job_id)",
        "job_assignments_lease": "INDEX job_assignments_lease ON public.job_assignments USING btree"
        " (lease_expires_at) WHERE (state = ANY (ARRAY['assigned'::text, 'running'::text]))",
        "jobs_queued": "INDEX jobs_queued ON public.jobs USING btree (shape, owner_id, priority DESC, created_at)"
        " WHERE ((status = 'queued'::text) AND (runnable_at IS NOT NULL))",
        "workspace_builds_one_active": "UNIQUE INDEX workspace_builds_one_active ON public.workspace_builds USING"
        " btree (workspace_id) WHERE (ended_at IS NULL)",
        "idx_workspace_build_orchestrations_pending": "INDEX idx_workspace_build_orchestrations_pending ON"
        " public.workspace_build_orchestrations USING btree (created_at) WHERE (status = 'pending'::text)",
    }
    assert {name: found[name].removeprefix("CREATE ") for name in promised} == promised


def test_what_runs_with_the_owners_rights_cannot_be_tricked_by_a_search_path(app):
    rows = app.execute("SELECT proname, proconfig FROM pg_proc WHERE prosecdef ORDER BY proname").fetchall()
    safe = ["search_path=pg_catalog, public, pg_temp"]
    assert rows == [("end_build_with_job", safe), ("record_verification", safe), ("record_verifications", safe)]


def test_triggers_that_guard_history_fire_always(app):
    rows = app.execute("SELECT tgname FROM pg_trigger WHERE tgenabled = 'A' ORDER BY tgname").fetchall()
    assert {"job_events_append_only", "job_events_append_only_truncate"} <= {row[0] for row in rows}


def test_what_no_line_explains_is_a_fault_that_names_its_constraint(app):
    with pytest.raises(psycopg.errors.CheckViolation) as refused:
        app.execute("INSERT INTO compute_nodes (name, cpus_milli) VALUES ('odd', -1)")
    meaning = faults.of(refused.value)
    assert meaning.code == "unexpected_constraint"
    assert "compute_nodes_cpus_milli_check" in str(meaning)
