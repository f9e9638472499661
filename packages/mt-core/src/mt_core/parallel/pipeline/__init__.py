"""Pipeline parallelism: `docs/pipeline.md` explains the schedules and who runs them."""
