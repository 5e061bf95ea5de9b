# Prints the exit status of the agent.
cat "$h/exit"
