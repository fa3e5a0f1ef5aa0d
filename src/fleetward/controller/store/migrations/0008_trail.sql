-- The signed trail: settled events become leaves of a growing tree whose heads are signed.

CREATE TABLE trail_origins (
    id integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    name text NOT NULL UNIQUE,
    public_key bytea NOT NULL,
    epoch integer NOT NULL DEFAULT app.epoch(),
    opened_at timestamptz NOT NULL DEFAULT app.now(),
    recovery_event_id bigint
);
COMMENT ON TABLE trail_origins IS 'The logs that were begun: the first, and one more after each restore.';
COMMENT ON COLUMN trail_origins.recovery_event_id IS 'The event, signed by the recovery key, that opened it; null for the first.';

CREATE TABLE trail_leaves (
    origin_id integer NOT NULL REFERENCES trail_origins,
    leaf_index bigint NOT NULL CONSTRAINT trail_leaves_leaf_index_check CHECK (leaf_index >= 0),
    event_id bigint NOT NULL,
    leaf_hash bytea NOT NULL,
    PRIMARY KEY (origin_id, leaf_index),
    CONSTRAINT trail_leaves_event_once UNIQUE (origin_id, event_id)
);
COMMENT ON TABLE trail_leaves IS 'Which event is which leaf of the tree: 0 to n - 1, without gap.';

CREATE TABLE trail_checkpoints (
    origin_id integer NOT NULL REFERENCES trail_origins,
    tree_size bigint NOT NULL,
    root_hash bytea NOT NULL,
    signed_note text NOT NULL,
    at timestamptz NOT NULL DEFAULT app.now(),
    PRIMARY KEY (origin_id, tree_size)
);
COMMENT ON TABLE trail_checkpoints IS 'The tree heads that we signed; each is consistent with all earlier ones.';

CREATE TRIGGER trail_leaves_append_only
    BEFORE UPDATE OR DELETE ON trail_leaves FOR EACH ROW EXECUTE FUNCTION app.refuse_change('the trail only grows');
CREATE TRIGGER trail_leaves_append_only_truncate
    BEFORE TRUNCATE ON trail_leaves FOR EACH STATEMENT EXECUTE FUNCTION app.refuse_change('the trail only grows');
CREATE TRIGGER trail_checkpoints_append_only
    BEFORE UPDATE OR DELETE ON trail_checkpoints FOR EACH ROW EXECUTE FUNCTION app.refuse_change('the trail only grows');
CREATE TRIGGER trail_checkpoints_append_only_truncate
    BEFORE TRUNCATE ON trail_checkpoints FOR EACH STATEMENT EXECUTE FUNCTION app.refuse_change('the trail only grows');
ALTER TABLE trail_leaves ENABLE ALWAYS TRIGGER trail_leaves_append_only;
ALTER TABLE trail_leaves ENABLE ALWAYS TRIGGER trail_leaves_append_only_truncate;
ALTER TABLE trail_checkpoints ENABLE ALWAYS TRIGGER trail_checkpoints_append_only;
ALTER TABLE trail_checkpoints ENABLE ALWAYS TRIGGER trail_checkpoints_append_only_truncate;
