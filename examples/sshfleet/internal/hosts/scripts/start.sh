# Starts the agent, or finds it started. The lock is taken once and never given
# back; who has it starts the agent, or has cancelled.
if [ ! -d "$h" ] || [ -d "$spent" ]; then
	echo lost
	exit 0
fi
if [ ! -d "$h/lock" ]; then
	printf '%s\n' "$token" >"$h/token.$$" && mv -f "$h/token.$$" "$h/token" || exit
	printf '%s\n' "$run" >"$h/run.$$" && mv -f "$h/run.$$" "$h/run" || exit
	env SWACTOR_CLAIM="$t" sh "$h/run" </dev/null >/dev/null 2>&1 &
fi
echo started
