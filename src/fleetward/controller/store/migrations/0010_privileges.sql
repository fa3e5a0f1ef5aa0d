-- Who may touch what. The service adds and moves rows by named columns; it never writes what only the
-- verification step may say, nor an event's or a fence's number, and it has no TRUNCATE and no DDL.

REVOKE ALL ON SCHEMA public FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA app FROM PUBLIC;

GRANT USAGE ON SCHEMA public, app TO fleetward_app, fleetward_seal, fleetward_ro;
GRANT EXECUTE ON FUNCTION app.now(), app.epoch() TO fleetward_app, fleetward_seal, fleetward_ro;
GRANT EXECUTE ON FUNCTION
    app.next_fence(),
    app.record_verification(uuid, bigint, text, jsonb, text),
    app.record_verifications(uuid[], bigint[], text[], jsonb[], text)
    TO fleetward_app;
GRANT USAGE ON SEQUENCE app.fence_numbers, app.event_numbers TO fleetward_app;

GRANT SELECT ON app.schema_migrations TO fleetward_app, fleetward_ro;
GRANT SELECT ON ALL TABLES IN SCHEMA public TO fleetward_app;

-- The house
GRANT UPDATE (keyring_fingerprint) ON cluster TO fleetward_app;
GRANT INSERT, UPDATE, DELETE ON controllers TO fleetward_app;

-- Access
GRANT INSERT ON users, api_keys, idempotency_keys, stranger_tries TO fleetward_app;
GRANT UPDATE (name, role, password_hash, suspended_at, deleted_at) ON users TO fleetward_app;
GRANT UPDATE (name, scopes, allow, expires_at, last_used_at, revoked_at) ON api_keys TO fleetward_app;
GRANT UPDATE (tries) ON stranger_tries TO fleetward_app;
GRANT DELETE ON idempotency_keys, stranger_tries TO fleetward_app;

-- Fleet
GRANT
    INSERT (
        id, name, display_name, status, mac, session, session_nonce, key_epoch, labels, cpus_milli, memory_bytes,
        disk_bytes, inventory, eligible, eligible_reason, eligible_until, replaces_node_id, created_at, joined_at
    ),
    UPDATE (
        display_name, status, session, session_nonce, key_epoch, labels, cpus_milli, memory_bytes, disk_bytes, inventory,
        eligible, eligible_reason, eligible_until, drain_id, drain_reason, drain_by, drain_deadline_at, drain_mode,
        drain_then, failures_in_row, first_verified_at, joined_at, removed_at
    )
    ON compute_nodes TO fleetward_app;
GRANT INSERT, DELETE ON node_devices, node_heartbeats TO fleetward_app;
GRANT UPDATE (kind, model, memory_bytes, attributes, quarantined_at, quarantine_reason) ON node_devices TO fleetward_app;
GRANT UPDATE (session, sequence, seen_at, beat_seconds, load) ON node_heartbeats TO fleetward_app;
GRANT INSERT (id, node_id, public_key, key_epoch, created_at), UPDATE (revoked_at) ON node_credentials TO fleetward_app;
GRANT
    INSERT (
        id, public_key, locator, labels, rekey_node_id, replaces_node_id, expires_at, created_by, created_at
    ),
    UPDATE (locator, tries, expires_at, used_at, used_by_node_id, used_by_key)
    ON node_pairing_codes TO fleetward_app;

-- Jobs
GRANT
    INSERT (
        id, kind, name, spec, priority, owner_id, shape, cpus_milli, memory_bytes, replicas, quorum, max_attempts,
        max_losses, runnable_at, held_until, queue_deadline_at, schedule_id, nominal_at, created_at
    ),
    UPDATE (
        status, priority, failures, losses, runnable_at, held_until, queue_deadline_at, started_at, finished_at,
        cancel_requested_at, cancel_reason, error
    )
    ON jobs TO fleetward_app;
GRANT INSERT ON job_dependencies, job_inputs TO fleetward_app;
GRANT INSERT, UPDATE (name, spec, cron, zone, next_at, deleted_at) ON schedules TO fleetward_app;
GRANT
    INSERT (id, job_id, node_id, attempt, assigned_at, lease_expires_at, cpus_milli, memory_bytes, uid),
    UPDATE (
        state, started_at, finished_at, lease_expires_at, verify_claimed_until, released_at, outcome, result, error, uid,
        log_bytes
    )
    ON job_assignments TO fleetward_app;
GRANT INSERT (assignment_id, node_id, device_uuid), UPDATE (released_at) ON assignment_devices TO fleetward_app;
GRANT INSERT, DELETE ON job_log_chunks TO fleetward_app;

-- Artifacts
GRANT INSERT, UPDATE (state, pack, pack_offset, created_at), DELETE ON blobs TO fleetward_app;
GRANT INSERT, DELETE ON blob_owners TO fleetward_app;
GRANT
    INSERT (id, job_id, assignment_id, path, size_bytes, sha256, media_type, is_receipt, declared_at),
    UPDATE (state, stored_at)
    ON job_artifacts TO fleetward_app;

-- Events
GRANT INSERT (job_id, assignment_id, node_id, kind, actor, data, at) ON job_events TO fleetward_app;
GRANT INSERT (subject_kind, subject_id, node_id, kind, actor, data, at) ON audit_events TO fleetward_app;
GRANT INSERT, DELETE ON event_private TO fleetward_app;
GRANT INSERT, UPDATE (url, secret_enc, cursor, disabled_at), DELETE ON webhooks TO fleetward_app;

-- Workspaces
GRANT INSERT, UPDATE (name, require_active_version, active_version_id, deleted_at) ON templates TO fleetward_app;
GRANT INSERT, UPDATE (status, sha256, parameters, error, archived_at) ON template_versions TO fleetward_app;
GRANT INSERT ON template_version_presets, workspace_build_parameters TO fleetward_app;
GRANT
    INSERT,
    UPDATE (
        name, owner_id, home_node_id, autostart_cron, autostart_zone, autostop_seconds, last_used_at, dormant_at, deleted_at
    )
    ON workspaces TO fleetward_app;
GRANT
    INSERT (
        id, workspace_id, build_number, transition, job_id, template_version_id, preset_id, reason, initiator_id,
        log_level, created_at
    ),
    UPDATE (log_level)
    ON workspace_builds TO fleetward_app;
GRANT
    INSERT (id, workspace_id, node_id, build_id, desired, resources, created_at),
    UPDATE (desired, resources, observed, released_at)
    ON workspace_residencies TO fleetward_app;
GRANT
    INSERT,
    UPDATE (updated_at, child_build_id, attempt_count, next_retry_after, status, error),
    DELETE
    ON workspace_build_orchestrations TO fleetward_app;

-- The sequencer
GRANT SELECT ON cluster, job_events, audit_events TO fleetward_seal;
GRANT SELECT, INSERT ON trail_origins, trail_leaves, trail_checkpoints TO fleetward_seal;

-- Readers: no hashes, no codes, no stored answers, no personal text, no sealed secrets
GRANT SELECT ON
    assignment_devices, audit_events, blob_owners, blobs, cluster, compute_nodes, controllers, job_artifacts,
    job_assignments, job_dependencies, job_events, job_inputs, job_log_chunks, jobs, lifecycle_edges, node_credentials,
    node_devices, node_heartbeats, schedules, template_version_presets, template_versions, templates, trail_checkpoints,
    trail_leaves, trail_origins, verifications, workspace_build_orchestrations, workspace_build_parameters,
    workspace_builds, workspace_residencies, workspaces
    TO fleetward_ro;
GRANT SELECT (id, name, role, created_at, suspended_at, deleted_at) ON users TO fleetward_ro;
GRANT SELECT (id, owner_id, name, scopes, allow, created_at, expires_at, last_used_at, revoked_at) ON api_keys TO fleetward_ro;
GRANT SELECT (id, url, cursor, created_at, disabled_at) ON webhooks TO fleetward_ro;
