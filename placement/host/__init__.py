"""The local machine: environment variables, core locks, processes, private folders."""
