-- Workflows that a tenant has stored by name. Every change is a version more; deleting takes the
-- documents and leaves the numbers, so that a version never means two documents.

CREATE TABLE shuntyard.workflow_templates (
    tenant text NOT NULL,
    name text NOT NULL,
    version integer NOT NULL CHECK (version > 0),
    -- JSON as text: jsonb knows neither the order of keys nor the character NUL.
    document text,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant, name, version)
);
