"""How the processes of a job start, meet, are watched and end. Standard library only; imports neither jax nor torch."""
