-- Collections of documents. Each collection has a table of chunks of its own, chunks_<id>, made with
-- it: vectors of one length, one HNSW index, and no query that could see another tenant's rows.

CREATE TABLE shuntyard.collections (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant text NOT NULL,
    name text NOT NULL,
    dimension integer NOT NULL CHECK (dimension > 0),
    metric text NOT NULL CHECK (metric IN ('cosine', 'l2', 'ip')),
    embedder text NOT NULL,
    embedder_revision text NOT NULL,
    -- Grows with every change of what the collection holds. A deleted collection keeps its row, so
    -- that the next one of its name goes on counting: an epoch never means two contents.
    epoch bigint NOT NULL DEFAULT 0,
    is_deleted boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (tenant, name)
);

CREATE TABLE shuntyard.documents (
    collection_id bigint NOT NULL REFERENCES shuntyard.collections ON DELETE CASCADE,
    id text NOT NULL,
    -- Of all that the chunks are made of: equal hash, equal chunks.
    content_hash bytea NOT NULL,
    num_chunks integer NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (collection_id, id)
);
