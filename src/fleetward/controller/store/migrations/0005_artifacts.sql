-- Bytes: what attempts hand in, what the store keeps, and what verification said.

CREATE TABLE blobs (
    sha256 text PRIMARY KEY CONSTRAINT blobs_sha256_check CHECK (sha256 ~ '^[0-9a-f]{64}$'),
    size_bytes bigint NOT NULL DEFAULT 0 CONSTRAINT blobs_size_bytes_check CHECK (size_bytes >= 0),
    state text NOT NULL DEFAULT 'stored' CONSTRAINT blobs_state_check CHECK (state IN ('stored', 'damaged', 'condemned')),
    pack text,
    pack_offset bigint,
    created_at timestamptz NOT NULL DEFAULT app.now(),
    CONSTRAINT blobs_pack_check CHECK (pack IS NULL OR pack_offset >= 0)
);
COMMENT ON TABLE blobs IS 'Bytes that are on disk, whole and synced, under their digest. Referring to one and condemning it both lock the row.';
COMMENT ON COLUMN blobs.state IS 'stored; damaged: found not to be what the row says, so nobody reads it and the next good copy takes the row over; or condemned: about to be deleted, and not to be referred to any more.';
COMMENT ON COLUMN blobs.pack IS 'The pack that holds the bytes at pack_offset; null when they are a file of their own.';

CREATE TABLE blob_owners (
    sha256 text NOT NULL REFERENCES blobs ON DELETE CASCADE,
    user_id uuid NOT NULL REFERENCES users,
    created_at timestamptz NOT NULL DEFAULT app.now(),
    PRIMARY KEY (sha256, user_id)
);
COMMENT ON TABLE blob_owners IS 'Who has shown the bytes of a blob, and may therefore refer to it.';

CREATE TABLE job_artifacts (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    job_id uuid NOT NULL,
    assignment_id uuid NOT NULL,
    path text NOT NULL,
    size_bytes bigint NOT NULL DEFAULT 0 CONSTRAINT job_artifacts_size_bytes_check CHECK (size_bytes >= 0),
    sha256 text NOT NULL DEFAULT 'e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'
        CONSTRAINT job_artifacts_sha256_check CHECK (sha256 ~ '^[0-9a-f]{64}$'),
    media_type text NOT NULL DEFAULT 'application/octet-stream',
    state text NOT NULL DEFAULT 'declared'
        CONSTRAINT job_artifacts_state_check CHECK (state IN ('declared', 'stored', 'verified', 'rejected')),
    is_receipt boolean NOT NULL DEFAULT false,
    declared_at timestamptz NOT NULL DEFAULT app.now(),
    stored_at timestamptz,
    verified_at timestamptz,
    CONSTRAINT job_artifacts_assignment_id_path_key UNIQUE (assignment_id, path),
    CONSTRAINT job_artifacts_assignment_id_job_id_fkey
        FOREIGN KEY (assignment_id, job_id) REFERENCES job_assignments (id, job_id) ON DELETE CASCADE,
    CONSTRAINT job_artifacts_shape_stored CHECK (stored_at IS NULL OR state <> 'declared'),
    CONSTRAINT job_artifacts_shape_verified CHECK ((verified_at IS NOT NULL) = (state = 'verified'))
) WITH (fillfactor = 50);
CREATE INDEX job_artifacts_by_job ON job_artifacts (job_id);
CREATE INDEX job_artifacts_by_blob ON job_artifacts (sha256);
COMMENT ON TABLE job_artifacts IS 'The files that an attempt hands in. What was declared never changes; only how far we can vouch for it does.';
COMMENT ON COLUMN job_artifacts.sha256 IS 'As the node declared it; 64 lowercase hex digits. Unless said otherwise, those of no bytes.';
COMMENT ON COLUMN job_artifacts.state IS 'declared by the node; stored once all its bytes are here and hash as declared; verified or rejected by the verification step.';
COMMENT ON COLUMN job_artifacts.is_receipt IS 'Whether it is the receipt, which differs between attempts and so does not count for agreement.';
COMMENT ON COLUMN job_artifacts.verified_at IS 'Written by app.record_verification alone.';

CREATE FUNCTION app.assert_artifact_write_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.id, NEW.job_id, NEW.assignment_id, NEW.path, NEW.size_bytes, NEW.sha256, NEW.is_receipt)
        IS DISTINCT FROM (OLD.id, OLD.job_id, OLD.assignment_id, OLD.path, OLD.size_bytes, OLD.sha256, OLD.is_receipt)
    THEN
        RAISE EXCEPTION 'artifact % of assignment % is write-once: it stays as it was declared', OLD.path, OLD.assignment_id
            USING ERRCODE = 'FW002', TABLE = 'job_artifacts';
    END IF;
    IF NEW.state <> OLD.state AND (OLD.state, NEW.state) NOT IN (
        ('declared', 'stored'), ('declared', 'rejected'), ('stored', 'verified'), ('stored', 'rejected')
    ) AND NEW.state IN ('declared', 'stored', 'verified', 'rejected') THEN
        RAISE EXCEPTION 'artifact % of assignment % cannot go from % to %', OLD.path, OLD.assignment_id, OLD.state, NEW.state
            USING ERRCODE = 'FW001', TABLE = 'job_artifacts', COLUMN = 'state';
    END IF;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION app.assert_artifact_write_once() IS 'Refuses another digest for a declared artifact (FW002), and a step back in how far it is vouched for (FW001).';

CREATE TRIGGER job_artifacts_born_at_start
    BEFORE INSERT ON job_artifacts FOR EACH ROW
    WHEN (NEW.state IS DISTINCT FROM 'declared')
    EXECUTE FUNCTION app.assert_born_at_start('state', 'declared', '{stored,verified,rejected}');
CREATE TRIGGER job_artifacts_write_once
    BEFORE UPDATE ON job_artifacts FOR EACH ROW EXECUTE FUNCTION app.assert_artifact_write_once();

CREATE TABLE verifications (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    assignment_id uuid NOT NULL REFERENCES job_assignments ON DELETE CASCADE,
    verdict text NOT NULL
        CONSTRAINT verifications_verdict_check CHECK (verdict IN ('verified', 'rejected', 'error')),
    checks jsonb NOT NULL DEFAULT '[]',
    verifier text NOT NULL DEFAULT '',
    at timestamptz NOT NULL DEFAULT app.now()
);
CREATE INDEX verifications_by_assignment ON verifications (assignment_id);
COMMENT ON TABLE verifications IS 'Every verdict on an attempt, the rejected ones and our own failures too; written by app.record_verification alone.';
COMMENT ON COLUMN verifications.checks IS 'Each check with the path that it looked at, whether it passed, and a sentence.';

CREATE TRIGGER verifications_stay_as_given
    BEFORE UPDATE ON verifications FOR EACH ROW EXECUTE FUNCTION app.refuse_change('a verdict stays as it was given');
CREATE TRIGGER verifications_no_truncate
    BEFORE TRUNCATE ON verifications FOR EACH STATEMENT EXECUTE FUNCTION app.refuse_change('verdicts are kept');
ALTER TABLE verifications ENABLE ALWAYS TRIGGER verifications_stay_as_given;
ALTER TABLE verifications ENABLE ALWAYS TRIGGER verifications_no_truncate;
