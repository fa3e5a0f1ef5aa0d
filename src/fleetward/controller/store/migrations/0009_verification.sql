-- The verification step: the one writer of what counts as verified, and of who won.

CREATE FUNCTION app.lock_for_verdicts(assignments uuid[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    its_jobs uuid[];
    its_builds uuid[];
BEGIN
    SELECT array_agg(DISTINCT held.job_id) INTO its_jobs
    FROM job_assignments AS held
    WHERE held.id = ANY (lock_for_verdicts.assignments);
    IF EXISTS (SELECT FROM jobs AS job WHERE job.id = ANY (its_jobs) AND job.kind = 'workspace_build') THEN
        SELECT array_agg(build.id) INTO its_builds FROM workspace_builds AS build WHERE build.job_id = ANY (its_jobs);
        PERFORM FROM workspaces AS place
        WHERE place.id IN (SELECT build.workspace_id FROM workspace_builds AS build WHERE build.id = ANY (its_builds))
        ORDER BY place.id FOR NO KEY UPDATE;
        PERFORM FROM workspace_build_orchestrations AS intent
        WHERE intent.parent_build_id = ANY (its_builds) OR intent.child_build_id = ANY (its_builds)
        ORDER BY intent.id FOR NO KEY UPDATE;
        PERFORM FROM workspace_builds AS build
        WHERE build.id = ANY (its_builds) ORDER BY build.id FOR NO KEY UPDATE;
    END IF;
    PERFORM FROM jobs AS job WHERE job.id = ANY (its_jobs) ORDER BY job.id FOR NO KEY UPDATE;
    PERFORM FROM job_assignments AS held
    WHERE held.id = ANY (lock_for_verdicts.assignments) ORDER BY held.id FOR NO KEY UPDATE;
END
$$;
COMMENT ON FUNCTION app.lock_for_verdicts(uuid[]) IS 'Locks what verdicts may end, in the one order: workspaces, orchestrations, builds, jobs, assignments.';

CREATE FUNCTION app.missing_artifact(spec jsonb, paths text[]) RETURNS text LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp AS $$
    -- Globs, and spellings other than the plain one, are for the verifier to judge.
    SELECT min(rule.value ->> 'path')
    FROM jsonb_array_elements(
        CASE jsonb_typeof(spec -> 'artifacts') WHEN 'array' THEN spec -> 'artifacts' ELSE '[]' END
    ) AS rule (value)
    WHERE coalesce(rule.value ->> 'required', 'true') = 'true'
      AND rule.value ->> 'path' ~ '^[ -~]+$'
      AND rule.value ->> 'path' !~ '[*?[]|(^|/)\.?(/|$)'
      AND NOT rule.value ->> 'path' = ANY (coalesce(paths, '{}'))
$$;
COMMENT ON FUNCTION app.missing_artifact(jsonb, text[]) IS 'A file that a job document requires by its plain name and that is not among these; null when there is none.';

CREATE FUNCTION app.why_refused(assignments uuid[], fences bigint[], verdicts text[]) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT array_agg(
        CASE
            WHEN held.id IS NULL THEN 'there is no such assignment'
            WHEN held.fence IS DISTINCT FROM given.fence THEN 'the fence is not the assignment''s own'
            WHEN held.artifacts_verified_at IS NOT NULL THEN 'the assignment is verified already'
            WHEN held.state <> 'succeeded' THEN 'the assignment is ' || held.state
            WHEN job.status <> 'running' THEN 'the job is ' || job.status
            WHEN given.verdict <> 'verified' THEN NULL
            WHEN handed_in.has_receipt IS NOT TRUE THEN 'the attempt handed in no receipt'
            WHEN handed_in.unstored IS NOT NULL
                THEN format('artifact %L was declared and is not stored', handed_in.unstored)
            ELSE
                'required artifact ' || quote_literal(app.missing_artifact(job.spec, handed_in.paths)) || ' was not handed in'
        END
        ORDER BY given.nth
    )
    FROM unnest(assignments, fences, verdicts) WITH ORDINALITY AS given (id, fence, verdict, nth)
    LEFT JOIN job_assignments AS held ON held.id = given.id
    LEFT JOIN jobs AS job ON job.id = held.job_id
    LEFT JOIN LATERAL (
        SELECT
            bool_or(file.is_receipt) AS has_receipt,
            min(file.path) FILTER (WHERE file.state <> 'stored' OR blob.sha256 IS NULL) AS unstored,
            array_agg(file.path) AS paths
        FROM job_artifacts AS file
        LEFT JOIN blobs AS blob
            ON blob.sha256 = file.sha256 AND blob.size_bytes = file.size_bytes AND blob.state = 'stored'
        WHERE file.assignment_id = held.id
    ) AS handed_in ON given.verdict = 'verified'
$$;
COMMENT ON FUNCTION app.why_refused(uuid[], bigint[], text[]) IS 'For each verdict why it cannot be taken, whatever a verifier says; null where it can.';

CREATE FUNCTION app.winners(its_jobs uuid[], OUT jobs uuid[], OUT assignments uuid[])
LANGUAGE sql STABLE SET search_path = pg_catalog, public, pg_temp AS $$
    WITH verified AS (
        SELECT
            held.id, held.job_id, held.node_id, held.fence, job.quorum,
            CASE WHEN job.quorum > 1 THEN (
                SELECT jsonb_agg(jsonb_build_array(file.path, file.sha256) ORDER BY file.path COLLATE "C")
                FROM job_artifacts AS file
                WHERE file.assignment_id = held.id AND NOT file.is_receipt
            ) END AS digests
        FROM jobs AS job
        JOIN job_assignments AS held ON held.job_id = job.id
        WHERE job.id = ANY (its_jobs) AND held.artifacts_verified_at IS NOT NULL
    ), agreed AS (
        SELECT job_id, (array_agg(id ORDER BY fence))[1] AS first, min(fence) AS fence
        FROM verified
        GROUP BY job_id, quorum, digests
        HAVING count(DISTINCT node_id) >= quorum
    ), best AS (
        SELECT DISTINCT ON (job_id) job_id, first FROM agreed ORDER BY job_id, fence
    )
    SELECT array_agg(job_id ORDER BY job_id), array_agg(first ORDER BY job_id) FROM best
$$;
COMMENT ON FUNCTION app.winners(uuid[]) IS 'Of these jobs those whose quorum of nodes agrees in every (path, digest), receipts apart, each with the lowest fence that does.';

CREATE FUNCTION app.record_verifications(
    assignments uuid[], fences bigint[], verdicts text[], checks jsonb[], verifier text
) RETURNS TABLE (assignment uuid, outcome text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    reasons text[];
    verified uuid[];
    rejected uuid[];
    won record;
    at timestamptz;
BEGIN
    IF EXISTS (SELECT FROM unnest(verdicts) AS word WHERE word IS NULL OR word NOT IN ('verified', 'rejected', 'error')) THEN
        RAISE EXCEPTION 'a verdict is verified, rejected or error, not one of %', verdicts USING ERRCODE = '22023';
    END IF;
    IF (SELECT count(DISTINCT id) < count(*) FROM unnest(assignments) AS id) THEN
        RAISE EXCEPTION 'an assignment is given two verdicts at once' USING ERRCODE = '22023';
    END IF;
    PERFORM app.lock_for_verdicts(assignments);
    reasons := app.why_refused(assignments, fences, verdicts);
    at := app.now();
    INSERT INTO verifications (assignment_id, verdict, checks, verifier, at)
    SELECT given.id, given.verdict, coalesce(given.checks, '[]'), coalesce(record_verifications.verifier, ''), at
    FROM unnest(assignments, verdicts, record_verifications.checks, reasons) AS given (id, verdict, checks, reason)
    WHERE given.reason IS NULL;
    SELECT
        array_agg(given.id) FILTER (WHERE given.verdict = 'verified'),
        array_agg(given.id) FILTER (WHERE given.verdict = 'rejected')
    INTO verified, rejected
    FROM unnest(assignments, verdicts, reasons) AS given (id, verdict, reason)
    WHERE given.reason IS NULL;
    IF rejected IS NOT NULL THEN
        UPDATE job_artifacts AS file SET state = 'rejected'
        FROM unnest(assignments, record_verifications.checks) AS given (id, checks)
        CROSS JOIN LATERAL jsonb_array_elements(given.checks) AS checked (value)
        WHERE given.id = ANY (rejected)
          AND file.assignment_id = given.id
          AND file.state IN ('declared', 'stored')
          AND file.path = checked.value ->> 'path'
          AND checked.value ->> 'passed' = 'false';
    END IF;
    UPDATE job_assignments AS held SET artifacts_verified_at = at, outcome = 'completed', verify_claimed_until = NULL
    WHERE held.id = ANY (verified);
    UPDATE job_artifacts AS file SET state = 'verified', verified_at = at
    WHERE file.assignment_id = ANY (verified);
    SELECT winners.jobs, winners.assignments INTO won
    FROM app.winners(ARRAY(SELECT held.job_id FROM job_assignments AS held WHERE held.id = ANY (verified))) AS winners;
    UPDATE jobs AS job SET
        status = 'completed', winning_assignment_id = winner.id, finished_at = at, runnable_at = NULL, held_until = NULL,
        error = NULL
    FROM unnest(won.jobs, won.assignments) AS winner (job_id, id)
    WHERE job.id = winner.job_id;
    RETURN QUERY
    SELECT
        given.id,
        CASE
            WHEN given.reason IS NOT NULL THEN 'refused: ' || given.reason
            WHEN given.verdict <> 'verified' THEN given.verdict
            WHEN held.job_id = ANY (won.jobs) THEN 'won'
            ELSE 'verified'
        END
    FROM unnest(assignments, verdicts, reasons) WITH ORDINALITY AS given (id, verdict, reason, nth)
    LEFT JOIN job_assignments AS held ON held.id = given.id
    ORDER BY given.nth;
END
$$;
COMMENT ON FUNCTION app.record_verifications(uuid[], bigint[], text[], jsonb[], text) IS 'Records verdicts on succeeded attempts of running jobs. For each gives won (its job is completed now, by the lowest fence of the agreeing quorum), verified (the quorum lacks others), rejected, error, or "refused: why", which records nothing. The caller writes the events, ends rejected attempts and cancels the losers, in the same transaction.';

CREATE FUNCTION app.record_verification(assignment uuid, fence bigint, verdict text, checks jsonb, verifier text)
RETURNS text
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT recorded.outcome
    FROM app.record_verifications(ARRAY[assignment], ARRAY[fence], ARRAY[verdict], ARRAY[checks], verifier) AS recorded
$$;
COMMENT ON FUNCTION app.record_verification(uuid, bigint, text, jsonb, text) IS 'app.record_verifications of one verdict: its outcome.';
