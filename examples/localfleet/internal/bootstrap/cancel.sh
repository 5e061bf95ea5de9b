set -eu
umask 077
mkdir -p "$d"
: >"$d/cancelled"
if mkdir "$d/lock" 2>/dev/null; then # it was not started, and never will be
	echo never >"$d/exit"
	exit 0
fi
tries=0
while [ ! -s "$d/pid" ] && [ ! -e "$d/exit" ] && [ "$tries" -lt 50 ]; do # on its way up
	tries=$((tries + 1))
	sleep 0.02
done
if [ ! -s "$d/pid" ]; then exit 0; fi
pid=$(cat "$d/pid")
# A number of a process may have come round: see whose it is, where one can.
lives() {
	[ ! -e "$d/exit" ] && kill -0 "$pid" 2>/dev/null || return 1
	[ -r "/proc/$pid/environ" ] || return 0
	looks=0
	while [ ! -e "$d/exit" ] && kill -0 "$pid" 2>/dev/null; do
		environment=$(tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null) || true
		# None is that of a process in the middle of an exec, but not for long.
		if [ -n "$environment" ] || [ "$looks" -ge 50 ]; then
			printf '%s\n' "$environment" | grep -qx "SWACTOR_SESSION=$session"
			return
		fi
		looks=$((looks + 1))
		sleep 0.02
	done
	return 1
}
signal=TERM
while lives; do
	kill "-$signal" "$pid" 2>/dev/null || true
	tries=0
	while lives && [ "$tries" -lt 50 ]; do
		tries=$((tries + 1))
		sleep 0.02
	done
	signal=KILL
done
