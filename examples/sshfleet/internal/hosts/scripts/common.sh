# What every script begins with. It knows $t, the token of a claim, and $dir.
#
#   $dir/claims/TOKEN/          there is a claim, or somebody tries to make one
#                     try.PID/  what becomes held/ if it goes well
#                     held/     the claim is made
#   $dir/spent/TOKEN/           the token has had its claim and gets no other
set -u
umask 077
# Who says something that nobody listens to any more would be killed in the middle
# of what it does. Caught and not ignored, because the ignored is inherited.
trap : PIPE
cd || exit
case $dir in /*) ;; *) dir=$PWD/$dir ;; esac
c=$dir/claims/$t
h=$c/held
spent=$dir/spent/$t

# take_away makes that a try comes to nothing, in one step.
take_away() {
	mv "$1" "$dir/fenced.$$" 2>/dev/null && rm -rf "$dir/fenced.$$"
}

# fence does that to whoever tries to make this claim.
fence() {
	for try in "$c"/try.*; do
		take_away "$try"
	done
}

# ours prints the processes of this claim. What they start inherits the mark,
# also what has left their process group. Where nothing shows environments it
# prints the group of the agent.
ours() {
	if [ -r /proc/self/environ ]; then
		printf '%s\n' /proc/[0-9]*/environ | xargs grep -ls "SWACTOR_CLAIM=$t" | sed 's,/proc/,,; s,/environ,,'
	elif [ -s "$h/group" ]; then
		ps -A -o pid= -o pgid= | while read -r pid group; do
			[ "$group" != "$(cat "$h/group")" ] || echo "$pid"
		done
	fi
}

# tick waits for a moment, which it asks for. A script that nobody listens to any
# more ends here.
tick() {
	echo tick
	read -r line || exit
}

# stop ends the processes of this claim. One look that finds nothing is not
# enough: a process shows no environment in the middle of an exec.
stop() {
	looks=0 nothing=0
	while [ "$nothing" -lt 2 ]; do
		pids=$(ours)
		if [ -n "$pids" ]; then
			nothing=0
			case $looks in
			0) kill -s TERM $pids 2>/dev/null ;;
			[0-9] | [0-9][0-9]) ;; # it may have something to put away
			*) kill -s KILL $pids 2>/dev/null ;;
			esac
			looks=$((looks + 1))
		else
			nothing=$((nothing + 1))
		fi
		tick
	done
}
