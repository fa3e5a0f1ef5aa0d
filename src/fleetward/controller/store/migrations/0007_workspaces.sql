-- Places to work: templates, workspaces, their builds, and the follow-ups of builds.

CREATE TYPE workspace_transition AS ENUM ('start', 'stop', 'delete');
CREATE TYPE build_reason AS ENUM (
    'initiator', 'autostart', 'autostop', 'dormancy', 'autodelete', 'dashboard', 'cli', 'ssh_connection',
    'vscode_connection', 'jetbrains_connection'
);

CREATE TABLE templates (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    name text NOT NULL,
    owner_id uuid REFERENCES users,
    provisioner text NOT NULL DEFAULT 'script'
        CONSTRAINT templates_provisioner_check CHECK (provisioner IN ('script', 'terraform')),
    require_active_version boolean NOT NULL DEFAULT false,
    active_version_id uuid,
    created_at timestamptz NOT NULL DEFAULT app.now(),
    deleted_at timestamptz
);
CREATE UNIQUE INDEX templates_one_living_name ON templates (name) WHERE deleted_at IS NULL;
COMMENT ON TABLE templates IS 'Recipes for workspaces.';

CREATE TABLE template_versions (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    template_id uuid NOT NULL REFERENCES templates ON DELETE CASCADE,
    name text NOT NULL DEFAULT '',
    status text NOT NULL DEFAULT 'importing'
        CONSTRAINT template_versions_status_check CHECK (status IN ('importing', 'ready', 'failed')),
    sha256 text,
    parameters jsonb NOT NULL DEFAULT '[]',
    error text,
    created_by uuid REFERENCES users,
    created_at timestamptz NOT NULL DEFAULT app.now(),
    archived_at timestamptz
);
CREATE INDEX template_versions_by_template ON template_versions (template_id);
COMMENT ON TABLE template_versions IS 'What a template was when it was pushed; never changed.';
COMMENT ON COLUMN template_versions.sha256 IS 'The blob that holds the template''s folder.';

ALTER TABLE templates ADD CONSTRAINT templates_active_version_id_fkey
    FOREIGN KEY (active_version_id) REFERENCES template_versions ON DELETE SET NULL;

CREATE TABLE template_version_presets (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    template_version_id uuid NOT NULL REFERENCES template_versions ON DELETE CASCADE,
    name text NOT NULL DEFAULT '',
    parameters jsonb NOT NULL DEFAULT '[]'
        CONSTRAINT template_version_presets_parameters_check CHECK (jsonb_typeof(parameters) = 'array'),
    created_at timestamptz NOT NULL DEFAULT app.now(),
    CONSTRAINT template_version_presets_id_template_version_id_key UNIQUE (id, template_version_id)
);
CREATE INDEX template_version_presets_by_version ON template_version_presets (template_version_id);
COMMENT ON TABLE template_version_presets IS 'Named sets of parameter values that belong to a version.';
COMMENT ON COLUMN template_version_presets.parameters IS 'An array of {"name", "value"}.';

CREATE TABLE workspaces (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    name text NOT NULL DEFAULT 'workspace-' || left(gen_random_uuid()::text, 8),
    owner_id uuid REFERENCES users,
    template_id uuid REFERENCES templates,
    home_node_id uuid REFERENCES compute_nodes,
    autostart_cron text,
    autostart_zone text NOT NULL DEFAULT 'UTC',
    autostop_seconds bigint,
    last_used_at timestamptz NOT NULL DEFAULT app.now(),
    dormant_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT app.now(),
    deleted_at timestamptz
);
CREATE UNIQUE INDEX workspaces_one_living_name ON workspaces (owner_id, name) NULLS NOT DISTINCT WHERE deleted_at IS NULL;
COMMENT ON TABLE workspaces IS 'Places to work that live on the fleet.';
COMMENT ON COLUMN workspaces.home_node_id IS 'The node that has its files; only the provisioner script needs one.';
COMMENT ON COLUMN workspaces.last_used_at IS 'A measurement: it puts off autostop and dormancy.';

CREATE TABLE workspace_builds (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    workspace_id uuid NOT NULL REFERENCES workspaces ON DELETE CASCADE,
    build_number integer NOT NULL DEFAULT 1 CONSTRAINT workspace_builds_build_number_check CHECK (build_number >= 1),
    transition workspace_transition NOT NULL DEFAULT 'start',
    job_id uuid REFERENCES jobs,
    template_version_id uuid REFERENCES template_versions,
    preset_id uuid REFERENCES template_version_presets ON DELETE SET NULL,
    reason build_reason NOT NULL DEFAULT 'initiator',
    initiator_id uuid REFERENCES users,
    log_level text NOT NULL DEFAULT ''
        CONSTRAINT workspace_builds_log_level_check CHECK (log_level IN ('', 'debug')),
    created_at timestamptz NOT NULL DEFAULT app.now(),
    ended_at timestamptz,
    CONSTRAINT workspace_builds_workspace_id_build_number_key UNIQUE (workspace_id, build_number),
    CONSTRAINT workspace_builds_id_workspace_id_key UNIQUE (id, workspace_id),
    CONSTRAINT workspace_builds_job_id_key UNIQUE (job_id)
);
CREATE UNIQUE INDEX workspace_builds_one_active ON workspace_builds (workspace_id) WHERE ended_at IS NULL;
COMMENT ON TABLE workspace_builds IS 'One change of a workspace; its work is a job, and it is complete when that job is.';
COMMENT ON COLUMN workspace_builds.ended_at IS 'Set by the trigger on jobs.status, in the transaction that ends the job, and by nothing else.';

CREATE FUNCTION app.end_build_with_job() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    UPDATE public.workspace_builds AS build SET ended_at = coalesce(NEW.finished_at, app.now())
    WHERE build.job_id = NEW.id AND build.ended_at IS NULL;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION app.end_build_with_job() IS 'Ends the build of a job that ended.';
CREATE TRIGGER jobs_end_their_build
    AFTER UPDATE OF status ON jobs FOR EACH ROW
    WHEN (NEW.status IN ('completed', 'failed', 'cancelled') AND OLD.status IN ('queued', 'running'))
    EXECUTE FUNCTION app.end_build_with_job();

CREATE TABLE workspace_build_parameters (
    build_id uuid NOT NULL REFERENCES workspace_builds ON DELETE CASCADE,
    name text NOT NULL,
    value text NOT NULL DEFAULT '',
    PRIMARY KEY (build_id, name)
);
COMMENT ON TABLE workspace_build_parameters IS 'The parameter values that a build was made with.';

CREATE TABLE workspace_residencies (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    workspace_id uuid NOT NULL REFERENCES workspaces,
    node_id uuid NOT NULL REFERENCES compute_nodes,
    build_id uuid REFERENCES workspace_builds,
    fence bigint NOT NULL DEFAULT app.next_fence(),
    desired text NOT NULL DEFAULT 'run'
        CONSTRAINT workspace_residencies_desired_check CHECK (desired IN ('run', 'stop')),
    resources jsonb NOT NULL DEFAULT '{}',
    observed jsonb NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT app.now(),
    released_at timestamptz
);
CREATE UNIQUE INDEX workspace_residencies_one_unreleased ON workspace_residencies (workspace_id) WHERE released_at IS NULL;
CREATE INDEX workspace_residencies_by_node ON workspace_residencies (node_id) WHERE released_at IS NULL;
COMMENT ON TABLE workspace_residencies IS 'Workspaces that run on a node after their start build has ended (provisioner script).';
COMMENT ON COLUMN workspace_residencies.resources IS 'What it holds of its node: {"cpus_milli", "memory_bytes"}.';
COMMENT ON COLUMN workspace_residencies.observed IS 'What the node last said of it; a measurement.';
CREATE TRIGGER workspace_residencies_node_not_removed
    BEFORE INSERT ON workspace_residencies FOR EACH ROW EXECUTE FUNCTION app.assert_node_not_removed();

CREATE TABLE workspace_build_orchestrations (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    created_at timestamptz NOT NULL DEFAULT app.now(),
    updated_at timestamptz NOT NULL DEFAULT app.now(),
    workspace_id uuid NOT NULL,
    parent_build_id uuid NOT NULL UNIQUE,
    child_build_id uuid UNIQUE,
    child_transition workspace_transition NOT NULL DEFAULT 'start',
    child_template_version_id uuid REFERENCES template_versions ON DELETE CASCADE,
    child_template_version_preset_id uuid,
    child_rich_parameter_values jsonb NOT NULL DEFAULT '[]',
    child_log_level text NOT NULL DEFAULT '',
    child_reason build_reason,
    attempt_count integer NOT NULL DEFAULT 0,
    next_retry_after timestamptz,
    status text NOT NULL DEFAULT 'pending',
    error text,
    CONSTRAINT workspace_build_orchestrations_status_check
        CHECK (status IN ('pending', 'completed', 'failed', 'canceled')),
    CONSTRAINT workspace_build_orchestrations_completed_child_check
        CHECK (status <> 'completed' OR child_build_id IS NOT NULL),
    CONSTRAINT workspace_build_orchestrations_child_parameters_check
        CHECK (jsonb_typeof(child_rich_parameter_values) = 'array'),
    CONSTRAINT workspace_build_orchestrations_attempt_count_check CHECK (attempt_count >= 0),
    CONSTRAINT workspace_build_orchestrations_next_retry_after_check
        CHECK (next_retry_after IS NULL OR status = 'pending'),
    CONSTRAINT workspace_build_orchestrations_child_preset_version_check
        CHECK (child_template_version_preset_id IS NULL OR child_template_version_id IS NOT NULL),
    CONSTRAINT workspace_build_orchestrations_child_log_level_check CHECK (child_log_level IN ('', 'debug')),
    CONSTRAINT workspace_build_orchestrations_child_preset_id_fkey
        FOREIGN KEY (child_template_version_preset_id) REFERENCES template_version_presets (id) ON DELETE SET NULL,
    -- With the column named, either of the two foreign keys may act first and the result is the same.
    CONSTRAINT workspace_build_orchestrations_child_preset_version_fkey
        FOREIGN KEY (child_template_version_preset_id, child_template_version_id)
        REFERENCES template_version_presets (id, template_version_id)
        ON DELETE SET NULL (child_template_version_preset_id),
    CONSTRAINT workspace_build_orchestrations_parent_build_workspace_id_fkey
        FOREIGN KEY (parent_build_id, workspace_id) REFERENCES workspace_builds (id, workspace_id) ON DELETE CASCADE,
    CONSTRAINT workspace_build_orchestrations_child_build_workspace_id_fkey
        FOREIGN KEY (child_build_id, workspace_id) REFERENCES workspace_builds (id, workspace_id) ON DELETE CASCADE
);
CREATE INDEX idx_workspace_build_orchestrations_pending ON workspace_build_orchestrations (created_at)
    WHERE status = 'pending';
CREATE INDEX workspace_build_orchestrations_by_workspace ON workspace_build_orchestrations (workspace_id);
CREATE INDEX workspace_build_orchestrations_by_version ON workspace_build_orchestrations (child_template_version_id)
    WHERE child_template_version_id IS NOT NULL;
CREATE INDEX workspace_build_orchestrations_by_preset ON workspace_build_orchestrations (child_template_version_preset_id)
    WHERE child_template_version_preset_id IS NOT NULL;
COMMENT ON TABLE workspace_build_orchestrations IS 'Intents: the build that shall follow when another one has completed. Made in the transaction of the parent build, so that no crash loses it.';
COMMENT ON COLUMN workspace_build_orchestrations.id IS 'The intent''s identity, shown to people.';
COMMENT ON COLUMN workspace_build_orchestrations.created_at IS 'When the intent was made; the oldest is served first.';
COMMENT ON COLUMN workspace_build_orchestrations.updated_at IS 'When anything of it last changed.';
COMMENT ON COLUMN workspace_build_orchestrations.workspace_id IS 'Copied from the parent, so that the database can hold both builds to one workspace.';
COMMENT ON COLUMN workspace_build_orchestrations.parent_build_id IS 'The build to wait for; it has at most one child.';
COMMENT ON COLUMN workspace_build_orchestrations.child_build_id IS 'The build that was made; null until then.';
COMMENT ON COLUMN workspace_build_orchestrations.child_transition IS 'What the child build shall do.';
COMMENT ON COLUMN workspace_build_orchestrations.child_template_version_id IS 'The version that the child is pinned to; null takes the one that is active when the child is made.';
COMMENT ON COLUMN workspace_build_orchestrations.child_template_version_preset_id IS 'The preset that was chosen; null once it is deleted. Its values are in child_rich_parameter_values already.';
COMMENT ON COLUMN workspace_build_orchestrations.child_rich_parameter_values IS 'The child''s parameter values, an array of {"name", "value"}; a preset''s are merged in when the row is made.';
COMMENT ON COLUMN workspace_build_orchestrations.child_log_level IS 'How much the child''s log says: empty, or debug.';
COMMENT ON COLUMN workspace_build_orchestrations.child_reason IS 'Who or what asked for the child; null takes the parent''s.';
COMMENT ON COLUMN workspace_build_orchestrations.attempt_count IS 'How often making the child failed in a way that may pass.';
COMMENT ON COLUMN workspace_build_orchestrations.next_retry_after IS 'Pending rows are passed over until then.';
COMMENT ON COLUMN workspace_build_orchestrations.status IS 'pending until the child is made (completed), can never be made (failed) or is not wanted any more (canceled); each of these is final.';
COMMENT ON COLUMN workspace_build_orchestrations.error IS 'Why it failed or was canceled, for people.';

CREATE FUNCTION app.copy_preset_values() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    preset jsonb;
BEGIN
    SELECT parameters INTO preset FROM public.template_version_presets WHERE id = NEW.child_template_version_preset_id;
    IF preset IS NULL OR jsonb_typeof(NEW.child_rich_parameter_values) IS DISTINCT FROM 'array' THEN
        RETURN NEW;
    END IF;
    NEW.child_rich_parameter_values := preset || coalesce(
        (
            SELECT jsonb_agg(given.value ORDER BY given.nth)
            FROM jsonb_array_elements(NEW.child_rich_parameter_values) WITH ORDINALITY AS given (value, nth)
            WHERE NOT EXISTS (
                SELECT FROM jsonb_array_elements(preset) AS ours (value)
                WHERE ours.value ->> 'name' = given.value ->> 'name'
            )
        ),
        '[]'
    );
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION app.copy_preset_values() IS 'Merges a preset''s values into a new intent, over those that were given.';

CREATE FUNCTION app.assert_terminal_is_final() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'orchestration % is % for good: its status, child and error do not change any more', OLD.id, OLD.status
        USING ERRCODE = 'FW001', TABLE = 'workspace_build_orchestrations', COLUMN = 'status';
END
$$;
COMMENT ON FUNCTION app.assert_terminal_is_final() IS 'Refuses (FW001) to change how an intent ended.';

CREATE FUNCTION app.assert_not_pending() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'orchestration % is pending: an intent never vanishes', OLD.id
        USING ERRCODE = 'FW002', TABLE = 'workspace_build_orchestrations', HINT = 'cancel it first';
END
$$;
COMMENT ON FUNCTION app.assert_not_pending() IS 'Refuses (FW002) to delete a pending intent, whatever started the delete.';

CREATE FUNCTION app.assert_version_not_pinned() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    pinning text;
BEGIN
    SELECT string_agg(intent.id::text, ', ' ORDER BY intent.created_at, intent.id) INTO pinning
    FROM public.workspace_build_orchestrations AS intent
    WHERE intent.child_template_version_id = OLD.id AND intent.status = 'pending';
    IF pinning IS NOT NULL THEN
        RAISE EXCEPTION 'template version % cannot be deleted: pending orchestrations are pinned to it: %', OLD.id, pinning
            USING ERRCODE = 'FW002', TABLE = 'template_versions', HINT = 'cancel them, or wait for them';
    END IF;
    RETURN OLD;
END
$$;
COMMENT ON FUNCTION app.assert_version_not_pinned() IS 'Refuses (FW002) to delete a version that a pending intent is pinned to, and names the intents.';

CREATE TRIGGER workspace_build_orchestrations_copy_preset
    BEFORE INSERT ON workspace_build_orchestrations FOR EACH ROW
    WHEN (NEW.child_template_version_preset_id IS NOT NULL)
    EXECUTE FUNCTION app.copy_preset_values();
CREATE TRIGGER workspace_build_orchestrations_lifecycle
    BEFORE UPDATE OF status ON workspace_build_orchestrations FOR EACH ROW
    WHEN (OLD.status IS DISTINCT FROM NEW.status)
    EXECUTE FUNCTION app.assert_lifecycle('status');
CREATE TRIGGER workspace_build_orchestrations_terminal_is_final
    BEFORE UPDATE OF status, child_build_id, error ON workspace_build_orchestrations FOR EACH ROW
    WHEN (
        OLD.status <> 'pending'
        AND (NEW.status, NEW.child_build_id, NEW.error) IS DISTINCT FROM (OLD.status, OLD.child_build_id, OLD.error)
    )
    EXECUTE FUNCTION app.assert_terminal_is_final();
CREATE TRIGGER workspace_build_orchestrations_pending_stay
    BEFORE DELETE ON workspace_build_orchestrations FOR EACH ROW
    WHEN (OLD.status = 'pending')
    EXECUTE FUNCTION app.assert_not_pending();
CREATE TRIGGER workspace_build_orchestrations_no_truncate
    BEFORE TRUNCATE ON workspace_build_orchestrations
    FOR EACH STATEMENT EXECUTE FUNCTION app.refuse_change('an intent never vanishes');
CREATE TRIGGER template_versions_pinned_stay
    BEFORE DELETE ON template_versions FOR EACH ROW EXECUTE FUNCTION app.assert_version_not_pinned();
ALTER TABLE workspace_build_orchestrations ENABLE ALWAYS TRIGGER workspace_build_orchestrations_pending_stay;
ALTER TABLE workspace_build_orchestrations ENABLE ALWAYS TRIGGER workspace_build_orchestrations_no_truncate;
