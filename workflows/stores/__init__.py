"""What workflows keep: Postgres with pgvector, embedded or anywhere else."""
