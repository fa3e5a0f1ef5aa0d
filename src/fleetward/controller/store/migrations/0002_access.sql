-- Who may do what.

CREATE TYPE api_key_scope AS ENUM (
    'node:*', 'node:read', 'node:create', 'node:update', 'node:delete',
    'pairing_code:*', 'pairing_code:read', 'pairing_code:create', 'pairing_code:delete',
    'job:*', 'job:read', 'job:create', 'job:update', 'job:delete',
    'blob:*', 'blob:read', 'blob:create',
    'template:*', 'template:read', 'template:create', 'template:update', 'template:delete',
    'workspace:*', 'workspace:read', 'workspace:create', 'workspace:update', 'workspace:delete', 'workspace:connect',
    'workspace_build:*', 'workspace_build:read', 'workspace_build:create', 'workspace_build:update',
    'workspace_build_orchestration:*', 'workspace_build_orchestration:read', 'workspace_build_orchestration:create',
    'workspace_build_orchestration:update', 'workspace_build_orchestration:delete',
    'user:*', 'user:read', 'user:create', 'user:update', 'user:delete',
    'api_key:*', 'api_key:read', 'api_key:create', 'api_key:update', 'api_key:delete',
    'schedule:*', 'schedule:read', 'schedule:create', 'schedule:update', 'schedule:delete',
    'webhook:*', 'webhook:read', 'webhook:create', 'webhook:update', 'webhook:delete',
    'event:*', 'event:read',
    'trail:*', 'trail:read',
    'system:*', 'system:read', 'system:update'
);
COMMENT ON TYPE api_key_scope IS 'What a key may do: exactly domain/access.py''s ALL_SCOPES.';

CREATE TABLE users (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    name text NOT NULL UNIQUE,
    role text NOT NULL DEFAULT 'member'
        CONSTRAINT users_role_check CHECK (role IN ('owner', 'operator', 'template-admin', 'member', 'auditor')),
    password_hash text,
    created_at timestamptz NOT NULL DEFAULT app.now(),
    suspended_at timestamptz,
    deleted_at timestamptz
);
COMMENT ON TABLE users IS 'People and programs that act through the API.';
COMMENT ON COLUMN users.password_hash IS 'Argon2id; null for a user who signs in by link or key only.';
COMMENT ON COLUMN users.suspended_at IS 'From then on nothing of this user''s passes, nor any key that the user owns.';

CREATE TABLE api_keys (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    owner_id uuid NOT NULL REFERENCES users,
    name text NOT NULL DEFAULT '',
    key_hash bytea NOT NULL,
    scopes api_key_scope[] NOT NULL DEFAULT '{}',
    allow jsonb NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT app.now(),
    expires_at timestamptz,
    last_used_at timestamptz,
    revoked_at timestamptz
);
CREATE INDEX api_keys_by_owner ON api_keys (owner_id);
COMMENT ON TABLE api_keys IS 'Keys of the API. The secret was shown once; only its HMAC is here.';
COMMENT ON COLUMN api_keys.allow IS 'The objects that the key is limited to; {} is no limit.';
COMMENT ON COLUMN api_keys.last_used_at IS 'A measurement: written behind, without an event.';

CREATE TABLE idempotency_keys (
    owner_id uuid NOT NULL REFERENCES users,
    key text NOT NULL,
    request_digest text NOT NULL,
    reply jsonb NOT NULL DEFAULT '{}',
    at timestamptz NOT NULL DEFAULT app.now(),
    epoch integer NOT NULL DEFAULT app.epoch(),
    PRIMARY KEY (owner_id, key),
    CONSTRAINT idempotency_keys_reply_check CHECK (octet_length(reply::text) <= 65536)
);
CREATE INDEX idempotency_keys_by_age ON idempotency_keys (at);
COMMENT ON TABLE idempotency_keys IS 'Answers to repeated calls, stored in the transaction of the effect and kept for 24 hours.';
COMMENT ON COLUMN idempotency_keys.epoch IS 'A reply of an older epoch tells of effects that a restore undid.';

CREATE TABLE stranger_tries (
    minute timestamptz NOT NULL,
    address_prefix text NOT NULL,
    kind text NOT NULL,
    tries integer NOT NULL DEFAULT 1,
    PRIMARY KEY (minute, address_prefix, kind)
);
COMMENT ON TABLE stranger_tries IS 'Failed tries of callers whom we do not know, one row per minute and address prefix; a measurement.';
