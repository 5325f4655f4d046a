"""What is decided before anything runs, in pure Python: the experiment, the mesh, the sharding table, memory, the plan."""
