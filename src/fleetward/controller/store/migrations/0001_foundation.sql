-- What every other migration stands on: the clock, the epoch, the two counters, the copy of the
-- lifecycles, and the triggers that several tables share.

CREATE SCHEMA app;

CREATE TABLE app.schema_migrations (
    number integer PRIMARY KEY,
    name text NOT NULL,
    sha256 text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE app.schema_migrations IS 'The migrations applied to this database, with the digest of each file as it was then.';

CREATE FUNCTION app.now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN clock_timestamp();
COMMENT ON FUNCTION app.now() IS 'The only clock. The simulator''s template database replaces it.';

CREATE TABLE cluster (
    is_this boolean PRIMARY KEY DEFAULT true CHECK (is_this),
    epoch integer NOT NULL DEFAULT 1 CHECK (epoch BETWEEN 1 AND 4194303),
    keyring_fingerprint text,
    created_at timestamptz NOT NULL DEFAULT app.now()
);
COMMENT ON TABLE cluster IS 'One row: what is true of this whole database.';
COMMENT ON COLUMN cluster.epoch IS 'How often the database was restored, from 1. Fences and session numbers carry it, so that what was promised after the backup is refused.';
COMMENT ON COLUMN cluster.keyring_fingerprint IS 'The keyring that this database was made with; a controller with another one refuses to start. Set once.';
INSERT INTO cluster DEFAULT VALUES;

CREATE FUNCTION app.epoch() RETURNS integer LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
BEGIN
    RETURN (SELECT cluster.epoch FROM public.cluster);
END
$$;
COMMENT ON FUNCTION app.epoch() IS 'The present epoch of the database.';

CREATE SEQUENCE app.fence_numbers AS bigint MAXVALUE 1099511627775;
COMMENT ON SEQUENCE app.fence_numbers IS 'The lower 40 bits of fences.';

CREATE FUNCTION app.next_fence() RETURNS bigint LANGUAGE sql VOLATILE
RETURN (app.epoch()::bigint << 40) | nextval('app.fence_numbers');
COMMENT ON FUNCTION app.next_fence() IS 'The next fence: epoch << 40 | a number that only grows.';

CREATE SEQUENCE app.event_numbers AS bigint;
COMMENT ON SEQUENCE app.event_numbers IS 'The ids of job_events and audit_events, which are one order.';

CREATE TABLE lifecycle_edges (
    table_name text NOT NULL,
    from_state text NOT NULL,
    event text NOT NULL,
    to_state text NOT NULL,
    PRIMARY KEY (table_name, from_state, event)
);
COMMENT ON TABLE lifecycle_edges IS 'The moves that domain/lifecycle.py allows, for the trigger that refuses all others; a test holds the two equal.';
INSERT INTO lifecycle_edges (table_name, from_state, event, to_state) VALUES
    ('compute_nodes', 'provisioning', 'sync', 'online'),
    ('compute_nodes', 'provisioning', 'retire', 'retired'),
    ('compute_nodes', 'provisioning', 'remove', 'removed'),
    ('compute_nodes', 'online', 'silence', 'offline'),
    ('compute_nodes', 'online', 'declare_dead', 'offline'),
    ('compute_nodes', 'online', 'drain', 'draining'),
    ('compute_nodes', 'online', 'retire', 'retired'),
    ('compute_nodes', 'online', 'remove', 'removed'),
    ('compute_nodes', 'offline', 'sync', 'online'),
    ('compute_nodes', 'offline', 'drain', 'draining'),
    ('compute_nodes', 'offline', 'retire', 'retired'),
    ('compute_nodes', 'offline', 'remove', 'removed'),
    ('compute_nodes', 'draining', 'undrain', 'offline'),
    ('compute_nodes', 'draining', 'drained_resume', 'offline'),
    ('compute_nodes', 'draining', 'drained_retire', 'retired'),
    ('compute_nodes', 'draining', 'remove', 'removed'),
    ('compute_nodes', 'retired', 'return', 'offline'),
    ('compute_nodes', 'retired', 'remove', 'removed'),
    ('jobs', 'queued', 'assign', 'running'),
    ('jobs', 'queued', 'cancel', 'cancelled'),
    ('jobs', 'queued', 'fail', 'failed'),
    ('jobs', 'running', 'requeue', 'queued'),
    ('jobs', 'running', 'complete', 'completed'),
    ('jobs', 'running', 'fail', 'failed'),
    ('jobs', 'running', 'cancel', 'cancelled'),
    ('job_assignments', 'assigned', 'start', 'running'),
    ('job_assignments', 'assigned', 'succeed', 'succeeded'),
    ('job_assignments', 'assigned', 'fail', 'failed'),
    ('job_assignments', 'assigned', 'lose', 'failed'),
    ('job_assignments', 'assigned', 'cancel', 'cancelled'),
    ('job_assignments', 'running', 'succeed', 'succeeded'),
    ('job_assignments', 'running', 'fail', 'failed'),
    ('job_assignments', 'running', 'lose', 'failed'),
    ('job_assignments', 'running', 'cancel', 'cancelled'),
    ('job_assignments', 'succeeded', 'reject', 'failed'),
    ('job_assignments', 'succeeded', 'lose', 'failed'),
    ('job_assignments', 'succeeded', 'cancel', 'cancelled'),
    ('workspace_build_orchestrations', 'pending', 'complete', 'completed'),
    ('workspace_build_orchestrations', 'pending', 'fail', 'failed'),
    ('workspace_build_orchestrations', 'pending', 'cancel', 'canceled');

CREATE FUNCTION app.assert_lifecycle() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    was text;
    asked text;
BEGIN
    IF TG_ARGV[0] = 'state' THEN
        was := OLD.state;
        asked := NEW.state;
    ELSE
        was := OLD.status;
        asked := NEW.status;
    END IF;
    IF EXISTS (
        SELECT FROM public.lifecycle_edges AS edge
        WHERE edge.table_name = TG_TABLE_NAME AND edge.from_state = was AND edge.to_state = asked
    ) THEN
        RETURN NEW;
    END IF;
    -- A word that is no state at all is for the table's own CHECK to name.
    IF NOT EXISTS (
        SELECT FROM public.lifecycle_edges AS edge
        WHERE edge.table_name = TG_TABLE_NAME AND asked IN (edge.from_state, edge.to_state)
    ) THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION '% % cannot go from % to %', TG_TABLE_NAME, OLD.id, was, asked USING
        ERRCODE = 'FW001', TABLE = TG_TABLE_NAME, COLUMN = TG_ARGV[0],
        HINT = coalesce(
            (
                SELECT 'from ' || was || ' it goes to ' || string_agg(DISTINCT edge.to_state, ', ')
                FROM public.lifecycle_edges AS edge
                WHERE edge.table_name = TG_TABLE_NAME AND edge.from_state = was
            ),
            was || ' is final'
        );
END
$$;
COMMENT ON FUNCTION app.assert_lifecycle() IS 'Refuses (FW001) a move that lifecycle_edges does not have. Its argument names the column.';

CREATE FUNCTION app.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of % is refused: %', TG_OP, TG_TABLE_NAME, TG_ARGV[0]
        USING ERRCODE = 'FW002', TABLE = TG_TABLE_NAME;
END
$$;
COMMENT ON FUNCTION app.refuse_change() IS 'Refuses (FW002) whatever fires it, for the reason that its argument gives.';

CREATE FUNCTION app.assert_node_not_removed() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    node record;
BEGIN
    -- A foreign key locks the node's key only, which does not stop a concurrent removal; this does.
    SELECT name, status INTO node FROM public.compute_nodes WHERE id = NEW.node_id FOR SHARE;
    IF node.status = 'removed' THEN
        RAISE EXCEPTION 'node % was removed: % takes no row for it', node.name, TG_TABLE_NAME
            USING ERRCODE = 'FW003', TABLE = TG_TABLE_NAME;
    END IF;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION app.assert_node_not_removed() IS 'Refuses (FW003) a row for a removed node, and holds off its removal until this transaction has ended.';

CREATE TRIGGER cluster_keyring_is_set_once
    BEFORE UPDATE OF keyring_fingerprint ON cluster FOR EACH ROW
    WHEN (OLD.keyring_fingerprint IS NOT NULL AND NEW.keyring_fingerprint IS DISTINCT FROM OLD.keyring_fingerprint)
    EXECUTE FUNCTION app.refuse_change('a database belongs to the keyring that it was made with');
