-- The verification step: the one writer of what counts as verified, and of who won.

CREATE FUNCTION app.lock_for_verdict(assignment uuid) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    its_job record;
    its_build record;
BEGIN
    SELECT job.id, job.kind INTO its_job
    FROM job_assignments AS held JOIN jobs AS job ON job.id = held.job_id
    WHERE held.id = lock_for_verdict.assignment;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF its_job.kind = 'workspace_build' THEN
        SELECT build.id, build.workspace_id INTO its_build FROM workspace_builds AS build WHERE build.job_id = its_job.id;
        PERFORM FROM workspaces AS workspace WHERE workspace.id = its_build.workspace_id FOR NO KEY UPDATE;
        PERFORM FROM workspace_build_orchestrations AS intent
        WHERE its_build.id IN (intent.parent_build_id, intent.child_build_id) ORDER BY intent.id FOR NO KEY UPDATE;
        PERFORM FROM workspace_builds AS build WHERE build.id = its_build.id FOR NO KEY UPDATE;
    END IF;
    PERFORM FROM jobs AS job WHERE job.id = its_job.id FOR NO KEY UPDATE;
    PERFORM FROM job_assignments AS held WHERE held.id = lock_for_verdict.assignment FOR NO KEY UPDATE;
    RETURN its_job.id;
END
$$;
COMMENT ON FUNCTION app.lock_for_verdict(uuid) IS 'Locks what a verdict may end, in the one order: workspace, orchestration, build, job, assignment. Gives the job.';

CREATE FUNCTION app.why_not_verifiable(assignment uuid, spec jsonb) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    missing text;
BEGIN
    IF NOT EXISTS (
        SELECT FROM job_artifacts AS file WHERE file.assignment_id = why_not_verifiable.assignment AND file.is_receipt
    ) THEN
        RETURN 'the attempt handed in no receipt';
    END IF;
    SELECT file.path INTO missing
    FROM job_artifacts AS file
    LEFT JOIN blobs AS blob
        ON blob.sha256 = file.sha256 AND blob.size_bytes = file.size_bytes AND blob.state = 'stored'
    WHERE file.assignment_id = why_not_verifiable.assignment
      AND (file.state <> 'stored' OR blob.sha256 IS NULL)
    ORDER BY file.path
    LIMIT 1;
    IF FOUND THEN
        RETURN format('artifact %L was declared and is not stored', missing);
    END IF;
    -- Globs, and spellings other than the plain one, are for the verifier to judge.
    SELECT rule.value ->> 'path' INTO missing
    FROM jsonb_array_elements(
        CASE jsonb_typeof(why_not_verifiable.spec -> 'artifacts') WHEN 'array' THEN why_not_verifiable.spec -> 'artifacts' ELSE '[]' END
    ) AS rule (value)
    WHERE coalesce(rule.value ->> 'required', 'true') = 'true'
      AND rule.value ->> 'path' ~ '^[ -~]+$'
      AND rule.value ->> 'path' !~ '[*?[]|(^|/)\.?(/|$)'
      AND NOT EXISTS (
          SELECT FROM job_artifacts AS file
          WHERE file.assignment_id = why_not_verifiable.assignment AND file.path = rule.value ->> 'path'
      )
    LIMIT 1;
    IF FOUND THEN
        RETURN format('required artifact %L was not handed in', missing);
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION app.why_not_verifiable(uuid, jsonb) IS 'Why an attempt cannot be verified, whatever a verifier says; null when it can.';

CREATE FUNCTION app.agreed_winner(assignment uuid, job uuid, quorum integer) RETURNS uuid
LANGUAGE sql STABLE SET search_path = pg_catalog, public, pg_temp AS $$
    WITH verified AS (
        SELECT
            held.id, held.node_id, held.fence,
            (
                SELECT coalesce(jsonb_agg(jsonb_build_array(file.path, file.sha256) ORDER BY file.path COLLATE "C"), '[]')
                FROM job_artifacts AS file
                WHERE file.assignment_id = held.id AND NOT file.is_receipt
            ) AS digests
        FROM job_assignments AS held
        WHERE held.job_id = agreed_winner.job AND held.artifacts_verified_at IS NOT NULL
    )
    SELECT (array_agg(same.id ORDER BY same.fence))[1]
    FROM verified AS ours
    JOIN verified AS same ON same.digests = ours.digests
    WHERE ours.id = agreed_winner.assignment
    HAVING count(DISTINCT same.node_id) >= agreed_winner.quorum
$$;
COMMENT ON FUNCTION app.agreed_winner(uuid, uuid, integer) IS 'The lowest fence among the verified attempts that agree with this one in every (path, digest), receipts apart, once a quorum of nodes does; else null.';

CREATE FUNCTION app.record_verification(assignment uuid, fence bigint, verdict text, checks jsonb, verifier text)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    its_job jobs%ROWTYPE;
    held job_assignments%ROWTYPE;
    winner uuid;
    reason text;
    at timestamptz;
BEGIN
    IF record_verification.verdict IS NULL OR record_verification.verdict NOT IN ('verified', 'rejected', 'error') THEN
        RAISE EXCEPTION '% is no verdict: verified, rejected or error', coalesce(quote_literal(record_verification.verdict), 'null')
            USING ERRCODE = '22023';
    END IF;
    its_job.id := app.lock_for_verdict(record_verification.assignment);
    IF its_job.id IS NULL THEN
        RETURN 'refused: there is no such assignment';
    END IF;
    SELECT job.* INTO its_job FROM jobs AS job WHERE job.id = its_job.id;
    SELECT attempt.* INTO held FROM job_assignments AS attempt WHERE attempt.id = record_verification.assignment;
    reason := CASE
        WHEN held.fence IS DISTINCT FROM record_verification.fence THEN 'the fence is not the assignment''s own'
        WHEN held.artifacts_verified_at IS NOT NULL THEN 'the assignment is verified already'
        WHEN held.state <> 'succeeded' THEN 'the assignment is ' || held.state
        WHEN its_job.status <> 'running' THEN 'the job is ' || its_job.status
        WHEN record_verification.verdict = 'verified' THEN app.why_not_verifiable(held.id, its_job.spec)
    END;
    IF reason IS NOT NULL THEN
        RETURN 'refused: ' || reason;
    END IF;
    at := app.now();
    INSERT INTO verifications (assignment_id, verdict, checks, verifier, at)
    VALUES (
        held.id, record_verification.verdict, coalesce(record_verification.checks, '[]'),
        coalesce(record_verification.verifier, ''), at
    );
    IF record_verification.verdict = 'rejected' THEN
        UPDATE job_artifacts AS file SET state = 'rejected'
        WHERE file.assignment_id = held.id
          AND file.state IN ('declared', 'stored')
          AND EXISTS (
              SELECT FROM jsonb_array_elements(record_verification.checks) AS checked (value)
              WHERE checked.value ->> 'path' = file.path AND checked.value ->> 'passed' = 'false'
          );
    END IF;
    IF record_verification.verdict <> 'verified' THEN
        RETURN record_verification.verdict;
    END IF;
    UPDATE job_assignments AS attempt SET artifacts_verified_at = at, outcome = 'completed', verify_claimed_until = NULL
    WHERE attempt.id = held.id;
    UPDATE job_artifacts AS file SET state = 'verified', verified_at = at
    WHERE file.assignment_id = held.id;
    winner := CASE its_job.quorum WHEN 1 THEN held.id ELSE app.agreed_winner(held.id, its_job.id, its_job.quorum) END;
    IF winner IS NULL THEN
        RETURN 'verified';
    END IF;
    UPDATE jobs AS job SET
        status = 'completed', winning_assignment_id = winner, finished_at = at, runnable_at = NULL, held_until = NULL,
        error = NULL
    WHERE job.id = its_job.id;
    RETURN 'won';
END
$$;
COMMENT ON FUNCTION app.record_verification(uuid, bigint, text, jsonb, text) IS 'Records a verdict on a succeeded attempt of a running job. Gives won (the job is completed with it, or with an equal of a lower fence), verified (the quorum lacks others), rejected, error, or "refused: why", which records nothing. The caller writes the events, ends a rejected attempt and cancels the losers, in the same transaction.';
