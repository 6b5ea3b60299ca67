"""The main job: starts a run, resumes and supervises it, and reports it."""
