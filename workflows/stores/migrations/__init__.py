"""The database's shape, as numbered SQL files: `0001_collections.sql`. Files that were released are
never changed; what comes later is a new file."""
