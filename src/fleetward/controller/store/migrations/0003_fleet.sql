-- Nodes: who they are, what they have, how they joined, when they were last heard.

CREATE TABLE compute_nodes (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    name text NOT NULL UNIQUE,
    display_name text NOT NULL DEFAULT '',
    status text NOT NULL DEFAULT 'provisioning'
        CONSTRAINT compute_nodes_status_check
        CHECK (status IN ('provisioning', 'online', 'draining', 'offline', 'retired', 'removed')),
    mac text,
    session bigint NOT NULL DEFAULT 0,
    session_nonce text,
    key_epoch integer NOT NULL DEFAULT 1,
    labels jsonb NOT NULL DEFAULT '{}',
    cpus_milli integer NOT NULL DEFAULT 0 CONSTRAINT compute_nodes_cpus_milli_check CHECK (cpus_milli >= 0),
    memory_bytes bigint NOT NULL DEFAULT 0 CONSTRAINT compute_nodes_memory_bytes_check CHECK (memory_bytes >= 0),
    disk_bytes bigint NOT NULL DEFAULT 0 CONSTRAINT compute_nodes_disk_bytes_check CHECK (disk_bytes >= 0),
    inventory jsonb NOT NULL DEFAULT '{}',
    eligible boolean NOT NULL DEFAULT true,
    eligible_reason text,
    eligible_until timestamptz,
    drain_id uuid,
    drain_reason text,
    drain_by text,
    drain_deadline_at timestamptz,
    drain_mode text CONSTRAINT compute_nodes_drain_mode_check CHECK (drain_mode IN ('graceful', 'quick', 'now')),
    drain_then text CONSTRAINT compute_nodes_drain_then_check CHECK (drain_then IN ('resume', 'retire')),
    replaces_node_id uuid REFERENCES compute_nodes,
    failures_in_row integer NOT NULL DEFAULT 0,
    first_verified_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT app.now(),
    joined_at timestamptz,
    removed_at timestamptz,
    CONSTRAINT compute_nodes_shape_drain CHECK (drain_id IS NULL OR status IN ('draining', 'retired', 'removed')),
    CONSTRAINT compute_nodes_shape_removed CHECK (removed_at IS NULL OR status = 'removed')
) WITH (fillfactor = 50);
CREATE INDEX compute_nodes_by_mac ON compute_nodes (mac);
COMMENT ON TABLE compute_nodes IS 'Machines that are, or were, part of the fleet. A row is kept for ever: events and used codes refer to it.';
COMMENT ON COLUMN compute_nodes.name IS 'node- and the 12 hex digits of the machine''s own MAC, unless a name was given; never changes.';
COMMENT ON COLUMN compute_nodes.mac IS 'Recorded, not unique: a MAC is a name and no proof. The key is the proof.';
COMMENT ON COLUMN compute_nodes.session IS 'The number of the node''s present session. Reports count only if they carry it.';
COMMENT ON COLUMN compute_nodes.session_nonce IS 'The nonce that opened the session: the same nonce gets the same answer.';
COMMENT ON COLUMN compute_nodes.key_epoch IS 'Which of the node''s keys counts; re-keying adds one.';
COMMENT ON COLUMN compute_nodes.cpus_milli IS 'CPUs in thousandths.';
COMMENT ON COLUMN compute_nodes.inventory IS 'What the machine said of itself when the session began.';
COMMENT ON COLUMN compute_nodes.eligible IS 'Whether it may get new work, which is not whether it is here.';
COMMENT ON COLUMN compute_nodes.eligible_until IS 'When an ineligible node is looked at again; null is never.';
COMMENT ON COLUMN compute_nodes.drain_id IS 'The drain under way; it ends only by this id.';
COMMENT ON COLUMN compute_nodes.replaces_node_id IS 'The removed node whose machine this one is, paired with a code made for that.';
COMMENT ON COLUMN compute_nodes.failures_in_row IS 'Attempts that failed fast, one after the other, on this node.';
COMMENT ON COLUMN compute_nodes.first_verified_at IS 'When an attempt of this node was first verified; until then it gets little at once.';

CREATE FUNCTION app.assert_removed_stays_removed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.status = 'removed' THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'node % (%) was removed and stays removed: it cannot go from % to %',
        OLD.name, OLD.id, OLD.status, NEW.status
        USING ERRCODE = 'FW001', TABLE = 'compute_nodes', COLUMN = 'status',
        HINT = 'pair the machine again, as another node';
END
$$;
COMMENT ON FUNCTION app.assert_removed_stays_removed() IS 'Refuses (FW001) to bring a removed node back.';

CREATE FUNCTION app.assert_removed_is_frozen() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'node % (%) was removed: its row does not change any more', OLD.name, OLD.id
        USING ERRCODE = 'FW002', TABLE = 'compute_nodes';
END
$$;
COMMENT ON FUNCTION app.assert_removed_is_frozen() IS 'Refuses (FW002) any change of a removed node''s row.';

CREATE FUNCTION app.assert_removed_holds_nothing() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    held uuid;
BEGIN
    SELECT assignment.id INTO held FROM public.job_assignments AS assignment
    WHERE assignment.node_id = NEW.id AND assignment.state IN ('assigned', 'running', 'succeeded') AND assignment.is_open
    LIMIT 1;
    IF held IS NOT NULL THEN
        RAISE EXCEPTION 'node % cannot be removed while its assignment % is open', NEW.name, held
            USING ERRCODE = 'FW002', TABLE = 'compute_nodes',
            HINT = 'end its open assignments in the same transaction';
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION app.assert_removed_holds_nothing() IS 'Refuses (FW002) at the end of a transaction that removed a node and left an assignment open there.';

CREATE TRIGGER compute_nodes_lifecycle
    BEFORE UPDATE OF status ON compute_nodes FOR EACH ROW
    WHEN (OLD.status IS DISTINCT FROM NEW.status AND OLD.status <> 'removed')
    EXECUTE FUNCTION app.assert_lifecycle('status');
CREATE TRIGGER compute_nodes_removed_is_terminal
    BEFORE UPDATE OF status ON compute_nodes FOR EACH ROW
    WHEN (OLD.status = 'removed')
    EXECUTE FUNCTION app.assert_removed_stays_removed();
CREATE TRIGGER compute_nodes_removed_is_frozen
    BEFORE UPDATE ON compute_nodes FOR EACH ROW
    WHEN (OLD.status = 'removed' AND NEW.status = 'removed' AND OLD IS DISTINCT FROM NEW)
    EXECUTE FUNCTION app.assert_removed_is_frozen();
CREATE TRIGGER compute_nodes_stay
    BEFORE DELETE ON compute_nodes FOR EACH ROW
    EXECUTE FUNCTION app.refuse_change('the row of a node is kept for ever; remove the node instead');
CREATE CONSTRAINT TRIGGER compute_nodes_removed_holds_nothing
    AFTER UPDATE OF status ON compute_nodes DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (NEW.status = 'removed' AND OLD.status <> 'removed')
    EXECUTE FUNCTION app.assert_removed_holds_nothing();
ALTER TABLE compute_nodes ENABLE ALWAYS TRIGGER compute_nodes_removed_is_terminal;
ALTER TABLE compute_nodes ENABLE ALWAYS TRIGGER compute_nodes_removed_is_frozen;
ALTER TABLE compute_nodes ENABLE ALWAYS TRIGGER compute_nodes_stay;

CREATE TABLE node_devices (
    node_id uuid NOT NULL REFERENCES compute_nodes,
    uuid text NOT NULL,
    kind text NOT NULL DEFAULT 'gpu',
    model text NOT NULL DEFAULT '',
    memory_bytes bigint NOT NULL DEFAULT 0,
    attributes jsonb NOT NULL DEFAULT '{}',
    quarantined_at timestamptz,
    quarantine_reason text,
    PRIMARY KEY (node_id, uuid)
);
COMMENT ON TABLE node_devices IS 'What a node has that is given out whole, such as GPUs; deleted when the node is removed.';
COMMENT ON COLUMN node_devices.uuid IS 'The device''s own identity, as its driver tells it: text, since drivers put words before the digits.';
COMMENT ON COLUMN node_devices.quarantined_at IS 'From then on the device is not given out; its node goes on.';

CREATE TABLE node_heartbeats (
    node_id uuid PRIMARY KEY REFERENCES compute_nodes,
    session bigint NOT NULL DEFAULT 0,
    sequence bigint NOT NULL DEFAULT 0,
    seen_at timestamptz NOT NULL DEFAULT app.now(),
    beat_seconds double precision NOT NULL DEFAULT 10,
    load jsonb NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50);
COMMENT ON TABLE node_heartbeats IS 'When each node was last heard and how busy it was: measurements, apart from compute_nodes so that a beat does not write there; deleted when the node is removed.';
COMMENT ON COLUMN node_heartbeats.sequence IS 'The number of the last sync in that session; an older one is refused.';

CREATE TABLE node_credentials (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    node_id uuid NOT NULL REFERENCES compute_nodes,
    public_key bytea NOT NULL,
    key_epoch integer NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT app.now(),
    revoked_at timestamptz,
    CONSTRAINT node_credentials_one_per_epoch UNIQUE (node_id, key_epoch)
);
CREATE UNIQUE INDEX node_credentials_one_live ON node_credentials (node_id) WHERE revoked_at IS NULL;
COMMENT ON TABLE node_credentials IS 'The public keys that nodes made for themselves.';
COMMENT ON COLUMN node_credentials.revoked_at IS 'Set once. A revoked key still proves whom the 410 is for, and nothing else.';

CREATE TRIGGER node_credentials_stay_as_given
    BEFORE UPDATE ON node_credentials FOR EACH ROW
    WHEN (
        OLD.revoked_at IS NOT NULL AND NEW.revoked_at IS DISTINCT FROM OLD.revoked_at
        OR (NEW.id, NEW.node_id, NEW.public_key, NEW.key_epoch) IS DISTINCT FROM (OLD.id, OLD.node_id, OLD.public_key, OLD.key_epoch)
    )
    EXECUTE FUNCTION app.refuse_change('a credential is only ever revoked, and once');
CREATE TRIGGER node_credentials_stay
    BEFORE DELETE ON node_credentials FOR EACH ROW
    EXECUTE FUNCTION app.refuse_change('revoke a credential instead');

CREATE TABLE node_pairing_codes (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    public_key bytea NOT NULL DEFAULT '\x',
    locator text,
    labels jsonb NOT NULL DEFAULT '{}',
    rekey_node_id uuid REFERENCES compute_nodes,
    replaces_node_id uuid REFERENCES compute_nodes,
    tries integer NOT NULL DEFAULT 0 CONSTRAINT node_pairing_codes_tries_check CHECK (tries >= 0),
    expires_at timestamptz NOT NULL DEFAULT app.now() + interval '10 minutes',
    used_at timestamptz,
    used_by_node_id uuid REFERENCES compute_nodes ON DELETE NO ACTION,
    used_by_key bytea,
    created_by uuid REFERENCES users,
    created_at timestamptz NOT NULL DEFAULT app.now(),
    CONSTRAINT node_pairing_codes_one_purpose CHECK (rekey_node_id IS NULL OR replaces_node_id IS NULL),
    CONSTRAINT node_pairing_codes_used_by_check CHECK (used_by_node_id IS NULL OR used_at IS NOT NULL)
);
CREATE UNIQUE INDEX node_pairing_codes_one_locator ON node_pairing_codes (locator) WHERE used_at IS NULL;
COMMENT ON TABLE node_pairing_codes IS 'One-time permissions to become a node. The secret is nowhere here: only the public half of the key that it seeds.';
COMMENT ON COLUMN node_pairing_codes.public_key IS 'What the joining machine must sign with; whoever reads it learns nothing that pairs.';
COMMENT ON COLUMN node_pairing_codes.locator IS 'The three letters of a short code; cleared once the code has lapsed, so that they may be given out again.';
COMMENT ON COLUMN node_pairing_codes.tries IS 'Failed tries, counted in transactions of their own; five burn the code.';
COMMENT ON COLUMN node_pairing_codes.used_by_key IS 'The node key that used it: the same machine asking again gets the same answer.';

CREATE TRIGGER node_pairing_codes_used_once
    BEFORE UPDATE ON node_pairing_codes FOR EACH ROW
    WHEN (
        OLD.used_at IS NOT NULL
        AND (NEW.used_at, NEW.used_by_node_id, NEW.used_by_key) IS DISTINCT FROM (OLD.used_at, OLD.used_by_node_id, OLD.used_by_key)
    )
    EXECUTE FUNCTION app.refuse_change('a pairing code is used once');

CREATE TRIGGER node_devices_node_not_removed
    BEFORE INSERT ON node_devices FOR EACH ROW EXECUTE FUNCTION app.assert_node_not_removed();
CREATE TRIGGER node_heartbeats_node_not_removed
    BEFORE INSERT ON node_heartbeats FOR EACH ROW EXECUTE FUNCTION app.assert_node_not_removed();
CREATE TRIGGER node_credentials_node_not_removed
    BEFORE INSERT ON node_credentials FOR EACH ROW EXECUTE FUNCTION app.assert_node_not_removed();

CREATE TABLE controllers (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    started_at timestamptz NOT NULL DEFAULT app.now(),
    seen_at timestamptz NOT NULL DEFAULT app.now()
) WITH (fillfactor = 50);
COMMENT ON TABLE controllers IS 'Which controllers run: measurements.';
