"""What to run, and in which order: DAG, signatures, fusion, joint scheduler, operators."""
