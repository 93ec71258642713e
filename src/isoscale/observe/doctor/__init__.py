"""Look at a machine, or at all machines of a job, as a run will find them: a finding a question, with what to do."""
