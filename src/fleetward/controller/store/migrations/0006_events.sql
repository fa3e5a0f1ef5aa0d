-- What happened. Both tables draw their ids from one sequence, so they are one order; a reader takes rows
-- with txid < pg_snapshot_xmin(pg_current_snapshot()) in (epoch, txid, id) order and skips nothing.

CREATE TABLE job_events (
    id bigint PRIMARY KEY DEFAULT nextval('app.event_numbers'),
    epoch integer NOT NULL DEFAULT app.epoch(),
    txid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    job_id uuid NOT NULL,
    assignment_id uuid,
    node_id uuid REFERENCES compute_nodes ON DELETE NO ACTION,
    kind text NOT NULL,
    actor text NOT NULL DEFAULT 'system',
    data jsonb NOT NULL DEFAULT '{}',
    at timestamptz NOT NULL DEFAULT app.now()
);
CREATE INDEX job_events_in_order ON job_events (epoch, txid, id);
CREATE INDEX job_events_by_job ON job_events (job_id);
COMMENT ON TABLE job_events IS 'What happened to jobs, in the transaction in which it happened. Rows are only ever added.';
COMMENT ON COLUMN job_events.txid IS 'The transaction; a row is settled once no older one is running.';
COMMENT ON COLUMN job_events.data IS 'The change itself: the columns that were set, so that the fold of all events of a thing equals its row.';

CREATE TABLE audit_events (
    id bigint PRIMARY KEY DEFAULT nextval('app.event_numbers'),
    epoch integer NOT NULL DEFAULT app.epoch(),
    txid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    subject_kind text NOT NULL,
    subject_id uuid,
    node_id uuid REFERENCES compute_nodes ON DELETE NO ACTION,
    kind text NOT NULL,
    actor text NOT NULL DEFAULT 'system',
    data jsonb NOT NULL DEFAULT '{}',
    at timestamptz NOT NULL DEFAULT app.now()
);
CREATE INDEX audit_events_in_order ON audit_events (epoch, txid, id);
CREATE INDEX audit_events_by_subject ON audit_events (subject_kind, subject_id);
COMMENT ON TABLE audit_events IS 'What happened to everything that is not a job. Rows are only ever added; personal text is in event_private.';
COMMENT ON COLUMN audit_events.subject_id IS 'What it happened to, without a foreign key: the trail outlives its subjects.';

CREATE TRIGGER job_events_append_only
    BEFORE UPDATE OR DELETE ON job_events FOR EACH ROW EXECUTE FUNCTION app.refuse_change('events are only ever added');
CREATE TRIGGER job_events_append_only_truncate
    BEFORE TRUNCATE ON job_events FOR EACH STATEMENT EXECUTE FUNCTION app.refuse_change('events are only ever added');
CREATE TRIGGER audit_events_append_only
    BEFORE UPDATE OR DELETE ON audit_events FOR EACH ROW EXECUTE FUNCTION app.refuse_change('events are only ever added');
CREATE TRIGGER audit_events_append_only_truncate
    BEFORE TRUNCATE ON audit_events FOR EACH STATEMENT EXECUTE FUNCTION app.refuse_change('events are only ever added');
ALTER TABLE job_events ENABLE ALWAYS TRIGGER job_events_append_only;
ALTER TABLE job_events ENABLE ALWAYS TRIGGER job_events_append_only_truncate;
ALTER TABLE audit_events ENABLE ALWAYS TRIGGER audit_events_append_only;
ALTER TABLE audit_events ENABLE ALWAYS TRIGGER audit_events_append_only_truncate;

CREATE TABLE event_private (
    event_id bigint PRIMARY KEY,
    salt bytea NOT NULL,
    text text NOT NULL
);
COMMENT ON TABLE event_private IS 'Personal text of events, which may be erased; the event itself holds the hash of salt and text.';

CREATE TABLE webhooks (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    url text NOT NULL,
    secret_enc bytea NOT NULL DEFAULT '\x',
    cursor text NOT NULL DEFAULT '',
    created_at timestamptz NOT NULL DEFAULT app.now(),
    disabled_at timestamptz
);
COMMENT ON TABLE webhooks IS 'Where events are delivered to, and how far each has come.';
COMMENT ON COLUMN webhooks.secret_enc IS 'What deliveries are signed with, sealed by a key of the keyring.';
