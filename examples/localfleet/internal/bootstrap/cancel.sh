set -eu
umask 077
mkdir -p "$d"
: >"$d/cancelled"
if mkdir "$d/lock" 2>/dev/null; then exit 0; fi # it was not started, and never will be
while [ ! -s "$d/pid" ]; do
	[ ! -e "$d/exit" ] || exit 0
	tries=$((${tries:-0} + 1))
	[ "$tries" -lt 100 ] || exit 0 # an earlier cancel has the lock
	sleep 0.02
done
pid=$(cat "$d/pid")
# A number of a process may have come round: see whose it is, where one can.
lives() {
	[ ! -e "$d/exit" ] && kill -0 "$pid" 2>/dev/null || return 1
	[ -r "/proc/$pid/environ" ] || return 0
	tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qx "SWACTOR_SESSION=$session"
}
signal=TERM
while lives; do
	kill "-$signal" "$pid" 2>/dev/null || true
	tries=0
	while lives && [ "$tries" -lt 100 ]; do
		tries=$((tries + 1))
		sleep 0.02
	done
	signal=KILL
done
