set -eu
umask 077
mkdir -p "$d"
if [ ! -e "$d/lock" ]; then
	printf %s "$token" >"$d/token.$$" && mv -f "$d/token.$$" "$d/token"
	printf %s "$run" >"$d/run.$$" && mv -f "$d/run.$$" "$d/run"
	# A cancel knows the agent by this, also before its process is the agent's:
	# what a shell exports is in the environment of what it starts, not in its own.
	SWACTOR_SESSION="$session" sh "$d/run" </dev/null >/dev/null 2>&1 &
fi
while [ ! -s "$d/pid" ]; do
	[ ! -e "$d/cancelled" ] || exit 77
	sleep 0.02
done
cat "$d/pid"
