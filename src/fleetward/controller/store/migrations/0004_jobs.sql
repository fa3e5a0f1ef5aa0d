-- Jobs, their attempts, and what the attempts hold.

CREATE TABLE schedules (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    name text NOT NULL,
    owner_id uuid REFERENCES users,
    spec jsonb NOT NULL DEFAULT '{}',
    cron text NOT NULL DEFAULT '',
    zone text NOT NULL DEFAULT 'UTC',
    next_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT app.now(),
    deleted_at timestamptz
);
CREATE INDEX schedules_due ON schedules (next_at) WHERE next_at IS NOT NULL;
COMMENT ON TABLE schedules IS 'Jobs that come again by the calendar of a zone.';
COMMENT ON COLUMN schedules.next_at IS 'The next nominal time; null while the schedule rests.';

CREATE TABLE jobs (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    kind text NOT NULL DEFAULT 'command',
    name text NOT NULL DEFAULT '',
    spec jsonb NOT NULL DEFAULT '{}',
    status text NOT NULL DEFAULT 'queued'
        CONSTRAINT jobs_status_check CHECK (status IN ('queued', 'running', 'completed', 'failed', 'cancelled')),
    priority integer NOT NULL DEFAULT 50,
    owner_id uuid REFERENCES users,
    shape text NOT NULL DEFAULT '',
    cpus_milli integer NOT NULL DEFAULT 1000 CONSTRAINT jobs_cpus_milli_check CHECK (cpus_milli >= 0),
    memory_bytes bigint NOT NULL DEFAULT 0 CONSTRAINT jobs_memory_bytes_check CHECK (memory_bytes >= 0),
    replicas integer NOT NULL DEFAULT 1 CONSTRAINT jobs_replicas_check CHECK (replicas >= 1),
    quorum integer NOT NULL DEFAULT 1 CONSTRAINT jobs_quorum_check CHECK (quorum >= 1),
    max_attempts integer NOT NULL DEFAULT 3,
    max_losses integer NOT NULL DEFAULT 20,
    failures integer NOT NULL DEFAULT 0,
    losses integer NOT NULL DEFAULT 0,
    runnable_at timestamptz,
    held_until timestamptz,
    queue_deadline_at timestamptz NOT NULL DEFAULT app.now() + interval '1 day',
    schedule_id uuid REFERENCES schedules,
    nominal_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT app.now(),
    started_at timestamptz,
    finished_at timestamptz,
    cancel_requested_at timestamptz,
    cancel_reason text,
    winning_assignment_id uuid,
    error text,
    CONSTRAINT jobs_schedule_id_nominal_at_key UNIQUE (schedule_id, nominal_at),
    CONSTRAINT jobs_shape_finished CHECK (finished_at IS NULL OR status IN ('completed', 'failed', 'cancelled')),
    CONSTRAINT jobs_shape_runnable CHECK (runnable_at IS NULL OR status IN ('queued', 'running')),
    CONSTRAINT jobs_shape_held CHECK (held_until IS NULL OR (runnable_at IS NULL AND status IN ('queued', 'running'))),
    CONSTRAINT jobs_shape_winner CHECK (winning_assignment_id IS NULL OR status = 'completed')
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX jobs_queued ON jobs (shape, owner_id, priority DESC, created_at)
    WHERE status = 'queued' AND runnable_at IS NOT NULL;
CREATE INDEX jobs_held ON jobs (held_until) WHERE held_until IS NOT NULL;
CREATE INDEX jobs_queue_deadline ON jobs (queue_deadline_at) WHERE status = 'queued';
CREATE INDEX jobs_wanting_copies ON jobs (id) WHERE status = 'running' AND replicas > 1 AND runnable_at IS NOT NULL;
COMMENT ON TABLE jobs IS 'What somebody wants done, once, and how far it is.';
COMMENT ON COLUMN jobs.kind IS 'What the job is for: command, or workspace_build.';
COMMENT ON COLUMN jobs.spec IS 'The job document as it was submitted.';
COMMENT ON COLUMN jobs.status IS 'running while any assignment is open; queued while it wants attempts and has none open.';
COMMENT ON COLUMN jobs.shape IS 'Digest of resources, labels, devices and sandbox: jobs of one shape fit the same nodes.';
COMMENT ON COLUMN jobs.failures IS 'Attempts that the job itself spent, of max_attempts.';
COMMENT ON COLUMN jobs.losses IS 'Attempts that the fleet lost, of max_losses.';
COMMENT ON COLUMN jobs.runnable_at IS 'Since when it may be assigned; null while a dependency, an array''s cap, a time or a back-off holds it.';
COMMENT ON COLUMN jobs.held_until IS 'When the back-off ends; runnable_at is null meanwhile.';
COMMENT ON COLUMN jobs.winning_assignment_id IS 'The verified attempt whose artifacts are the job''s. Written by app.record_verification alone.';

CREATE TABLE job_dependencies (
    job_id uuid NOT NULL REFERENCES jobs ON DELETE CASCADE,
    needs_job_id uuid NOT NULL REFERENCES jobs,
    PRIMARY KEY (job_id, needs_job_id),
    CONSTRAINT job_dependencies_not_itself CHECK (job_id <> needs_job_id)
);
CREATE INDEX job_dependencies_by_needed ON job_dependencies (needs_job_id);
COMMENT ON TABLE job_dependencies IS 'Which jobs wait for which others to complete.';

CREATE TABLE job_assignments (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    job_id uuid NOT NULL REFERENCES jobs ON DELETE CASCADE,
    node_id uuid NOT NULL REFERENCES compute_nodes ON DELETE RESTRICT,
    state text NOT NULL DEFAULT 'assigned'
        CONSTRAINT job_assignments_state_check
        CHECK (state IN ('assigned', 'running', 'succeeded', 'failed', 'cancelled')),
    attempt integer NOT NULL DEFAULT 1,
    fence bigint NOT NULL DEFAULT app.next_fence(),
    assigned_at timestamptz NOT NULL DEFAULT app.now(),
    started_at timestamptz,
    finished_at timestamptz,
    lease_expires_at timestamptz DEFAULT app.now() + interval '90 seconds',
    artifacts_verified_at timestamptz,
    verify_claimed_until timestamptz,
    released_at timestamptz,
    is_open boolean NOT NULL
        GENERATED ALWAYS AS (state IN ('assigned', 'running') OR (state = 'succeeded' AND artifacts_verified_at IS NULL)) STORED,
    outcome text
        CONSTRAINT job_assignments_outcome_check
        CHECK (outcome IN ('completed', 'failed', 'rejected', 'lost', 'cancelled')),
    result jsonb NOT NULL DEFAULT '{}',
    error text,
    cpus_milli integer NOT NULL DEFAULT 0 CONSTRAINT job_assignments_cpus_milli_check CHECK (cpus_milli >= 0),
    memory_bytes bigint NOT NULL DEFAULT 0 CONSTRAINT job_assignments_memory_bytes_check CHECK (memory_bytes >= 0),
    uid integer,
    log_bytes bigint NOT NULL DEFAULT 0,
    CONSTRAINT job_assignments_id_job_id_key UNIQUE (id, job_id),
    CONSTRAINT job_assignments_job_id_fence_key UNIQUE (job_id, fence),
    CONSTRAINT job_assignments_finished_at_check CHECK (finished_at IS NULL OR finished_at >= assigned_at),
    CONSTRAINT job_assignments_shape_finished CHECK (finished_at IS NULL OR state IN ('succeeded', 'failed', 'cancelled')),
    CONSTRAINT job_assignments_shape_outcome CHECK (outcome IS NULL OR state IN ('succeeded', 'failed', 'cancelled')),
    CONSTRAINT job_assignments_shape_released CHECK (released_at IS NULL OR state IN ('succeeded', 'failed', 'cancelled')),
    CONSTRAINT job_assignments_shape_started CHECK (started_at IS NULL OR state <> 'assigned'),
    CONSTRAINT job_assignments_shape_verified CHECK (artifacts_verified_at IS NULL OR state = 'succeeded')
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);
CREATE UNIQUE INDEX job_assignments_open_per_node ON job_assignments (job_id, node_id)
    WHERE state IN ('assigned', 'running', 'succeeded');
CREATE INDEX job_assignments_by_node ON job_assignments (node_id, state);
CREATE INDEX job_assignments_by_job ON job_assignments (job_id);
CREATE INDEX job_assignments_lease ON job_assignments (lease_expires_at) WHERE state IN ('assigned', 'running');
CREATE INDEX job_assignments_unreleased ON job_assignments (node_id) WHERE released_at IS NULL;
CREATE INDEX job_assignments_unverified ON job_assignments (id)
    WHERE state = 'succeeded' AND artifacts_verified_at IS NULL;
COMMENT ON TABLE job_assignments IS 'One row per (job, node, attempt): who was handed what, and how it went.';
COMMENT ON COLUMN job_assignments.state IS 'assigned: handed over. running: the node says it started. succeeded: the node says it finished, which nobody has verified yet. failed: gave up, was rejected, or was lost. cancelled: superseded.';
COMMENT ON COLUMN job_assignments.attempt IS 'How often this node was handed this job, this time included.';
COMMENT ON COLUMN job_assignments.fence IS 'Grows with each assignment of the job and is never used again; what carries an older one is refused.';
COMMENT ON COLUMN job_assignments.lease_expires_at IS 'Until when the node is believed without being heard; a measurement.';
COMMENT ON COLUMN job_assignments.artifacts_verified_at IS 'When the verification step vouched for the artifacts. Its only writer is app.record_verification. NULL on a succeeded assignment means that the job is NOT complete: so far it is the node''s word.';
COMMENT ON COLUMN job_assignments.verify_claimed_until IS 'Until when one verifier has the row to itself; a measurement.';
COMMENT ON COLUMN job_assignments.released_at IS 'When the process tree was gone: reported, or given up with its node. Until then it holds its CPU, memory and devices, ended or not.';
COMMENT ON COLUMN job_assignments.is_open IS 'Whether something may still come of it: assigned, running, or succeeded and not verified.';
COMMENT ON COLUMN job_assignments.outcome IS 'How it ended, by who is to blame: completed; failed and rejected count against the job; lost against the fleet; cancelled against nobody.';
COMMENT ON COLUMN job_assignments.uid IS 'The user id of its processes, where each attempt has one of its own.';
COMMENT ON COLUMN job_assignments.log_bytes IS 'How much log has arrived; a measurement.';

ALTER TABLE jobs ADD CONSTRAINT jobs_winning_assignment_id_fkey
    FOREIGN KEY (winning_assignment_id, id) REFERENCES job_assignments (id, job_id);

CREATE TABLE assignment_devices (
    assignment_id uuid NOT NULL REFERENCES job_assignments ON DELETE CASCADE,
    node_id uuid NOT NULL REFERENCES compute_nodes,
    device_uuid text NOT NULL,
    released_at timestamptz,
    PRIMARY KEY (assignment_id, device_uuid)
);
CREATE UNIQUE INDEX assignment_devices_one_holder ON assignment_devices (node_id, device_uuid) WHERE released_at IS NULL;
COMMENT ON TABLE assignment_devices IS 'Which attempt has which device: one at a time, whatever two planners think.';

CREATE TABLE job_inputs (
    job_id uuid NOT NULL REFERENCES jobs ON DELETE CASCADE,
    path text NOT NULL,
    sha256 text NOT NULL,
    PRIMARY KEY (job_id, path)
);
CREATE INDEX job_inputs_by_blob ON job_inputs (sha256);
COMMENT ON TABLE job_inputs IS 'The archives that a job''s attempts unpack before they start.';

CREATE TABLE job_log_chunks (
    assignment_id uuid NOT NULL REFERENCES job_assignments ON DELETE CASCADE,
    start_offset bigint NOT NULL CONSTRAINT job_log_chunks_start_offset_check CHECK (start_offset >= 0),
    content bytea NOT NULL,
    at timestamptz NOT NULL DEFAULT app.now(),
    PRIMARY KEY (assignment_id, start_offset)
);
COMMENT ON TABLE job_log_chunks IS 'What attempts printed, in pieces: a measurement, deleted when it has aged.';

CREATE FUNCTION app.assert_born_at_start() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    given text;
BEGIN
    IF TG_ARGV[0] = 'state' THEN
        given := NEW.state;
    ELSE
        given := NEW.status;
    END IF;
    -- A word that is no state at all is for the table's own CHECK to name.
    IF given IS NOT DISTINCT FROM TG_ARGV[1] OR NOT given = ANY (TG_ARGV[2]::text[]) THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'a row of % begins as %, not as %', TG_TABLE_NAME, TG_ARGV[1], given
        USING ERRCODE = 'FW005', TABLE = TG_TABLE_NAME, COLUMN = TG_ARGV[0],
        HINT = 'insert it as ' || TG_ARGV[1] || ' and let it go its way';
END
$$;
COMMENT ON FUNCTION app.assert_born_at_start() IS 'Refuses (FW005) a row born beyond its start state. Arguments: the column, the start state, the others.';

CREATE FUNCTION app.assert_completed_has_winner() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM public.job_assignments AS winner
        WHERE winner.id = NEW.winning_assignment_id
          AND winner.job_id = NEW.id
          AND winner.state = 'succeeded'
          AND winner.artifacts_verified_at IS NOT NULL
    ) THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'job % cannot be completed: it has no verified winner', NEW.id
        USING ERRCODE = 'FW004', TABLE = 'jobs', COLUMN = 'winning_assignment_id',
        HINT = 'app.record_verification completes a job when its quorum agrees';
END
$$;
COMMENT ON FUNCTION app.assert_completed_has_winner() IS 'Refuses (FW004) at once a completed job without a verified winner.';

CREATE FUNCTION app.assert_told_of_stays() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM public.job_events AS event WHERE event.job_id = OLD.id) THEN
        RAISE EXCEPTION 'job % cannot be deleted: the trail tells of it', OLD.id
            USING ERRCODE = 'FW002', TABLE = 'jobs';
    END IF;
    RETURN OLD;
END
$$;
COMMENT ON FUNCTION app.assert_told_of_stays() IS 'Refuses (FW002) to delete a job that has events.';

CREATE TRIGGER jobs_born_at_start
    BEFORE INSERT ON jobs FOR EACH ROW
    WHEN (NEW.status IS DISTINCT FROM 'queued')
    EXECUTE FUNCTION app.assert_born_at_start('status', 'queued', '{running,completed,failed,cancelled}');
CREATE TRIGGER jobs_completed_has_winner
    BEFORE INSERT OR UPDATE OF status, winning_assignment_id ON jobs FOR EACH ROW
    WHEN (NEW.status = 'completed')
    EXECUTE FUNCTION app.assert_completed_has_winner();
CREATE TRIGGER jobs_lifecycle
    BEFORE UPDATE OF status ON jobs FOR EACH ROW
    WHEN (OLD.status IS DISTINCT FROM NEW.status)
    EXECUTE FUNCTION app.assert_lifecycle('status');
CREATE TRIGGER jobs_winner_is_final
    BEFORE UPDATE OF winning_assignment_id ON jobs FOR EACH ROW
    WHEN (OLD.winning_assignment_id IS NOT NULL AND NEW.winning_assignment_id IS DISTINCT FROM OLD.winning_assignment_id)
    EXECUTE FUNCTION app.refuse_change('a job has one winner, and keeps it');
CREATE TRIGGER jobs_told_of_stay
    BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION app.assert_told_of_stays();

CREATE TRIGGER job_assignments_born_at_start
    BEFORE INSERT ON job_assignments FOR EACH ROW
    WHEN (NEW.state IS DISTINCT FROM 'assigned')
    EXECUTE FUNCTION app.assert_born_at_start('state', 'assigned', '{running,succeeded,failed,cancelled}');
CREATE TRIGGER job_assignments_born_unverified
    BEFORE INSERT ON job_assignments FOR EACH ROW
    WHEN (NEW.artifacts_verified_at IS NOT NULL)
    EXECUTE FUNCTION app.refuse_change('no assignment is born verified');
CREATE TRIGGER job_assignments_lifecycle
    BEFORE UPDATE OF state ON job_assignments FOR EACH ROW
    WHEN (OLD.state IS DISTINCT FROM NEW.state)
    EXECUTE FUNCTION app.assert_lifecycle('state');
CREATE TRIGGER job_assignments_node_not_removed
    BEFORE INSERT ON job_assignments FOR EACH ROW EXECUTE FUNCTION app.assert_node_not_removed();
CREATE TRIGGER job_assignments_verified_once
    BEFORE UPDATE OF artifacts_verified_at ON job_assignments FOR EACH ROW
    WHEN (OLD.artifacts_verified_at IS NOT NULL AND NEW.artifacts_verified_at IS DISTINCT FROM OLD.artifacts_verified_at)
    EXECUTE FUNCTION app.refuse_change('a verified assignment stays verified');
