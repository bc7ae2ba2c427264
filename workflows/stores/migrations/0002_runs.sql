-- Runs of workflows, and what happened in them. JSON is stored as bytes: it may hold NUL, which
-- Postgres' own types do not take, and nothing here looks into it.

CREATE TABLE shuntyard.runs (
    id text PRIMARY KEY,
    tenant text NOT NULL,
    -- The server that works on it, by a number for which it holds an advisory lock while it lives.
    owner bigint NOT NULL,
    idempotency_key text,
    request_hash bytea,
    -- JSON: the workflow's name, and why the run failed.
    head bytea NOT NULL,
    document bytea NOT NULL,
    inputs bytea NOT NULL,
    status text NOT NULL,
    created_at timestamptz NOT NULL,
    finished_at timestamptz,
    num_bytes bigint NOT NULL DEFAULT 0
);

CREATE UNIQUE INDEX runs_by_key ON shuntyard.runs (tenant, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX runs_of_tenant ON shuntyard.runs (tenant, created_at, id);
CREATE INDEX runs_at_work ON shuntyard.runs (owner) WHERE finished_at IS NULL;
CREATE INDEX runs_ended ON shuntyard.runs (finished_at) INCLUDE (num_bytes)
    WHERE finished_at IS NOT NULL;

CREATE TABLE shuntyard.run_events (
    run_id text NOT NULL REFERENCES shuntyard.runs ON DELETE CASCADE,
    -- Of a run inside another one's node, where that stands; empty for the run itself.
    path text NOT NULL,
    first_number integer NOT NULL,
    -- JSON: events with consecutive numbers, from first_number on.
    events bytea NOT NULL,
    PRIMARY KEY (run_id, path, first_number)
);
