"""Fast programs for every form: `attention`, its plan, and the programs it chooses from."""
