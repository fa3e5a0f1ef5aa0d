"""The promises of workspace_build_orchestrations, each refused by its own name."""

import json

import psycopg
import pytest
from psycopg import errors

from fleetward.controller.store import faults
from tests.store.rows import build, one, orchestration, preset, template_version, workspace

PREFIX = "workspace_build_orchestrations_"


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("status = 'bogus'", "status_check"),
        ("status = 'cancelled'", "status_check"),
        ("status = 'completed'", "completed_child_check"),
        ("child_rich_parameter_values = '{}'", "child_parameters_check"),
        ("child_rich_parameter_values = '\"text\"'", "child_parameters_check"),
        ("attempt_count = -1", "attempt_count_check"),
        ("status = 'failed', next_retry_after = now()", "next_retry_after_check"),
        ("child_log_level = 'trace'", "child_log_level_check"),
        ("child_template_version_preset_id = %(preset)s", "child_preset_version_check"),
        (
            "child_template_version_preset_id = gen_random_uuid(), child_template_version_id = %(version)s",
            "child_preset_id_fkey",
        ),
        (
            "child_template_version_preset_id = %(preset)s, child_template_version_id = %(other_version)s",
            "child_preset_version_fkey",
        ),
        ("child_template_version_id = gen_random_uuid()", "child_template_version_id_fkey"),
        ("parent_build_id = %(other_build)s", "parent_build_workspace_id_fkey"),
        ("child_build_id = %(other_build)s", "child_build_workspace_id_fkey"),
        ("parent_build_id = NULL", None),
        ("workspace_id = NULL", None),
        ("child_transition = NULL", None),
    ],
)
def test_a_broken_row_is_refused_by_name(owner, change, constraint):
    id = orchestration(owner)
    version = template_version(owner)
    names = {
        "id": id,
        "version": version,
        "preset": preset(owner, version),
        "other_version": template_version(owner),
        "other_build": build(owner, workspace(owner)),
    }
    with pytest.raises(errors.IntegrityError) as refused:
        owner.execute(f"UPDATE workspace_build_orchestrations SET {change} WHERE id = %(id)s".encode(), names)
    assert refused.value.diag.constraint_name == (constraint and PREFIX + constraint)


@pytest.mark.parametrize("column", ["parent_build_id", "child_build_id"])
def test_a_build_is_parent_once_and_child_once(owner, column):
    id = orchestration(owner)
    place, parent = owner.execute(
        "SELECT workspace_id, parent_build_id FROM workspace_build_orchestrations WHERE id = %s", [id]
    ).fetchone()
    child = one(owner, "SELECT id FROM workspace_builds WHERE workspace_id = %s AND build_number = 2", [place])
    owner.execute("UPDATE workspace_build_orchestrations SET child_build_id = %s WHERE id = %s", [child, id])
    third = build(owner, place, 3)
    values = {"parent_build_id": (parent, third), "child_build_id": (third, child)}[column]
    with pytest.raises(errors.UniqueViolation) as refused:
        owner.execute(
            "INSERT INTO workspace_build_orchestrations (workspace_id, parent_build_id, child_build_id,"
            " child_transition) VALUES (%s, %s, %s, 'start')",
            [place, *values],
        )
    assert refused.value.diag.constraint_name == f"{PREFIX}{column}_key"


@pytest.mark.parametrize("value", ["status = 'bogus'", "attempt_count = -1"])
def test_the_service_meets_the_same_names_when_it_inserts(app, value):
    place = workspace(app)
    parent = build(app, place)
    column, _, given = value.partition(" = ")
    with pytest.raises(errors.CheckViolation) as refused:
        app.execute(
            f"INSERT INTO workspace_build_orchestrations (workspace_id, parent_build_id, child_transition, {column})"
            f" VALUES (%s, %s, 'start', {given})".encode(),
            [place, parent],
        )
    assert refused.value.diag.constraint_name == f"{PREFIX}{column}_check"


def _end(connection: psycopg.Connection, id: object, status: str = "failed") -> None:
    connection.execute("UPDATE workspace_build_orchestrations SET status = %s WHERE id = %s", [status, id])


@pytest.mark.parametrize("change", ["status = 'pending'", "error = 'another'", "child_build_id = %(child)s"])
def test_how_it_ended_is_final(owner, change):
    id = orchestration(owner)
    _end(owner, id)
    place = one(owner, "SELECT workspace_id FROM workspace_build_orchestrations WHERE id = %s", [id])
    child = one(owner, "SELECT id FROM workspace_builds WHERE workspace_id = %s AND build_number = 2", [place])
    with pytest.raises(psycopg.Error) as refused:
        owner.execute(
            f"UPDATE workspace_build_orchestrations SET {change} WHERE id = %(id)s".encode(),
            {"id": id, "child": child},
        )
    assert refused.value.sqlstate == faults.ILLEGAL_MOVE


@pytest.mark.parametrize(
    "deletion",
    [
        "DELETE FROM workspace_build_orchestrations WHERE id = %(id)s",
        "DELETE FROM workspace_builds WHERE id = %(parent)s",
        "DELETE FROM workspaces WHERE id = %(place)s",
        "DELETE FROM template_versions WHERE id = %(version)s",
        "DELETE FROM templates",
    ],
)
@pytest.mark.parametrize("status", ["pending", "failed"])
def test_a_pending_intent_never_vanishes_whatever_starts_the_delete(owner, deletion, status):
    id = orchestration(owner)
    version = template_version(owner)
    place, parent = owner.execute(
        "UPDATE workspace_build_orchestrations SET child_template_version_id = %s WHERE id = %s"
        " RETURNING workspace_id, parent_build_id",
        [version, id],
    ).fetchone()
    if status == "failed":
        _end(owner, id)
    names = {"id": id, "parent": parent, "place": place, "version": version}
    left = "SELECT count(*) FROM workspace_build_orchestrations WHERE id = %s"
    if status == "failed":
        owner.execute(deletion, names)
        assert one(owner, left, [id]) == 0
        return
    with pytest.raises(psycopg.Error) as refused, owner.transaction():
        owner.execute(deletion, names)
    assert refused.value.sqlstate == faults.FROZEN
    assert str(id) in str(refused.value)
    assert one(owner, left, [id]) == 1


@pytest.mark.parametrize("replica", [False, True])
@pytest.mark.parametrize("table", ["workspace_build_orchestrations", "workspaces", "templates"])
def test_intents_do_not_vanish_by_truncation_either(owner, table, replica):
    orchestration(owner)
    if replica:
        owner.execute("SET LOCAL session_replication_role = replica")
    with pytest.raises(psycopg.Error) as refused, owner.transaction():
        owner.execute(f"TRUNCATE {table} CASCADE")
    assert refused.value.sqlstate == faults.FROZEN


def test_deleting_a_preset_clears_only_the_preset_also_of_an_ended_intent(owner):
    version = template_version(owner)
    chosen = preset(owner, version, json.dumps([{"name": "size", "value": "big"}]))
    for status in ("pending", "failed"):
        id = orchestration(owner)
        owner.execute(
            "UPDATE workspace_build_orchestrations SET child_template_version_preset_id = %s,"
            " child_template_version_id = %s, status = %s WHERE id = %s",
            [chosen, version, status, id],
        )
    owner.execute("DELETE FROM template_version_presets WHERE id = %s", [chosen])
    rows = owner.execute(
        "SELECT child_template_version_preset_id, child_template_version_id FROM workspace_build_orchestrations"
        " WHERE child_template_version_id = %s",
        [version],
    ).fetchall()
    assert rows == [(None, version), (None, version)]


def test_a_presets_values_are_copied_over_those_given(app):
    version = template_version(app)
    chosen = preset(app, version, json.dumps([{"name": "size", "value": "big"}, {"name": "disk", "value": "1"}]))
    place = workspace(app)
    values = one(
        app,
        "INSERT INTO workspace_build_orchestrations (workspace_id, parent_build_id, child_transition,"
        " child_template_version_id, child_template_version_preset_id, child_rich_parameter_values)"
        " VALUES (%s, %s, 'start', %s, %s, %s) RETURNING child_rich_parameter_values",
        [
            place,
            build(app, place),
            version,
            chosen,
            json.dumps([{"name": "size", "value": "small"}, {"name": "region", "value": "lab"}]),
        ],
    )
    assert values == [
        {"name": "size", "value": "big"},
        {"name": "disk", "value": "1"},
        {"name": "region", "value": "lab"},
    ]


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_build_ends_with_its_job_and_only_so(app, status):
    place = workspace(app)
    id = build(app, place)
    with pytest.raises(errors.UniqueViolation) as refused, app.transaction():
        app.execute("INSERT INTO workspace_builds (workspace_id, build_number) VALUES (%s, 2)", [place])
    assert refused.value.diag.constraint_name == "workspace_builds_one_active"
    app.execute(
        "UPDATE jobs SET status = %s, finished_at = jobs.created_at FROM workspace_builds AS build"
        " WHERE build.job_id = jobs.id AND build.id = %s",
        [status, id],
    )
    ended_at = one(app, "SELECT ended_at FROM workspace_builds WHERE id = %s", [id])
    assert ended_at == one(
        app,
        "SELECT finished_at FROM jobs JOIN workspace_builds AS build ON build.job_id = jobs.id WHERE build.id = %s",
        [id],
    )
    app.execute("INSERT INTO workspace_builds (workspace_id, build_number) VALUES (%s, 2)", [place])


def test_a_workspace_lives_on_one_node_at_a_time(app):
    place = workspace(app)
    machine = one(app, "INSERT INTO compute_nodes (name) VALUES ('one-home') RETURNING id")
    insert = "INSERT INTO workspace_residencies (workspace_id, node_id) VALUES (%s, %s)"
    app.execute(insert, [place, machine])
    with pytest.raises(errors.UniqueViolation) as refused:
        app.execute(insert, [place, machine])
    assert refused.value.diag.constraint_name == "workspace_residencies_one_unreleased"


def test_every_column_says_what_it_is_for(app):
    silent = app.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = 'workspace_build_orchestrations'::regclass"
        " AND attnum > 0 AND col_description(attrelid, attnum) IS NULL"
    ).fetchall()
    assert silent == []
