# Prints what is new of the agent's output, once for each line that comes in,
# and ends with the connection that they come from. It ends with status 3 when
# the agent has ended, and 4 when it has vanished without a word.
absent=0
know_boot
while [ ! -s "$h/pid" ]; do
	[ ! -e "$h/cancelled" ] || exit 4
	[ -n "$(ours)" ] || absent=$((absent + 1)) # on its way up, or killed on it
	[ "$absent" -lt 50 ] || exit 4
	read -r line || exit 0
done
cd "$h/work" || exit 4
exec 3<"$h/stdout" 4<"$h/stderr"
pid=$(cat "$h/pid")
absent=0
while read -r line; do
	ended=
	if [ -s "$h/exit" ]; then
		ended=3
	elif ! kill -s 0 "$pid" 2>/dev/null; then
		absent=$((absent + 1)) # its exit status may be on its way to the file
		[ "$absent" -lt 50 ] || ended=4
	fi
	cat <&3
	cat <&4 >&2
	eval "$sources"
	[ -z "$ended" ] || exit "$ended"
done
