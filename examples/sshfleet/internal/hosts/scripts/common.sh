# What every script begins with. It knows $t, the token of a claim, and $dir.
#
#   $dir/claims/TOKEN/                there is a claim, or somebody tries to make one
#                     try.PID.BEGAN/  what becomes held/ if it goes well
#                     held/           the claim is made
#   $dir/spent/TOKEN/                 the token has had its claim and gets no other
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

# readable ends the script if what there is of a directory cannot be read: that is
# not the same as nothing, and looks like it.
readable() {
	above=$1
	while [ ! -e "$above" ] && [ ! -L "$above" ]; do
		above=${above%/*}
		[ -n "$above" ] || above=/
	done
	if [ -x "$above" ] && [ -d "$above" ]; then
		[ "$above" != "$1" ] || ls "$1" >/dev/null 2>&1 || [ ! -e "$1" ] && return # also if it went meanwhile
	fi
	echo "cannot read $above" >&2
	exit 1
}
readable "$dir/claims"
readable "$dir/spent"
[ -z "$t" ] || readable "$c"

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

# know_boot names the time since this computer, or what it takes for one, was
# started: in another one all processes are others.
know_boot() {
	boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)-$(began 1)
}

# began prints when a process began, "-" if nothing says.
began() {
	[ -r "/proc/$1/stat" ] && sed -n '$s/.*) //p' "/proc/$1/stat" | cut -d ' ' -f 20 || echo -
}

# note writes the group and the session of this shell into the claim: whatever is
# started from here is in them unless it leaves, whether or not it shows the mark.
# With when their leader began, because their numbers are given away again.
note() {
	know_boot
	if [ -r /proc/self/stat ]; then
		set -- $(sed -n '$s/.*) //p' "/proc/$$/stat")
		set -- "$3" "$4"
	else
		set -- $(ps -o pgid= -p "$$")
	fi
	for id in "$@"; do
		echo "$boot $id $(began "$id")" >>"$h/groups" || return
	done
}

# processes prints the number of each process, its parent, group, session, and
# when it began. What has ended and is not waited for is none.
processes() {
	if [ -r /proc/self/stat ]; then
		printf '%s\n' /proc/[0-9]*/stat | LC_ALL=C xargs grep -s '' /dev/null |
			LC_ALL=C sed -n 's,^/proc/\([0-9]*\)/stat:.*) [^ZX] ,\1 ,p' | cut -d ' ' -f 1-4,20
	else
		ps -A -o pid= -o ppid= -o pgid= | while read -r pid parent group; do
			echo "$pid $parent $group - -"
		done
	fi
}

# ours prints the processes of this claim, and when each began: those that bear the
# mark, which what they start inherits, those of a group or session that is noted,
# those that were seen before, and all that descend from them. It fails if it
# cannot know. The boot has to be known before. Of the group of this shell, which a clean-up command is in too, it
# leaves out what this shell runs; if the shell does not lead it, all: then the
# server has given it the group of others.
ours() {
	{
		processes | sed 's/^/process /'
		[ ! -r /proc/self/environ ] ||
			printf '%s\n' /proc/[0-9]*/environ | xargs grep -ls "SWACTOR_CLAIM=$t" | sed 's,/proc/,marked ,; s,/environ,,'
		[ ! -e "$h/groups" ] || sed 's/^/noted /' "$h/groups"
		echo "$seen" | sed "s/^/noted $boot /"
	} | awk -v self="$$" -v boot="$boot" '
		$1 == "process" { parent[$2] = $3; group[$2] = $4; session[$2] = $5; began[$2] = $6 "" }
		$1 == "marked" { marked[$2] }
		$1 == "noted" && $2 == boot && $3 > 1 { noted[$3] = $4 "" }
		END {
			if (!(self in parent)) exit 1
			mine[self]
			do {
				more = 0
				for (p in parent) if (!(p in mine) && parent[p] in mine) { mine[p]; more = 1 }
			} while (more)
			for (id in noted) {
				if (id in began && began[id] != noted[id]) continue # another one of this number
				if (group[self] != self && (id == group[self] || id == session[self])) continue
				kin[id]
			}
			do {
				more = 0
				for (p in parent) {
					if (p in ours || p in mine) continue
					if (p in marked || p in kin || parent[p] in ours || group[p] in kin || session[p] in kin) {
						ours[p]; kin[p]; more = 1
					}
				}
			} while (more)
			for (p in ours) print p, began[p]
		}'
}
seen=

# tick waits for a moment, which it asks for. A script that nobody listens to any
# more ends here.
tick() {
	echo tick
	read -r line || exit
}

# stop ends the processes of this claim. One look that finds nothing is not
# enough: a process shows no environment in the middle of an exec. Whoever was seen
# stays ours though his parent, or what else has told so, is gone.
stop() {
	know_boot
	looks=0 nothing=0
	while [ "$nothing" -lt 2 ]; do
		found=$(ours) || {
			echo "the processes of this host cannot be listed" >&2
			exit 1
		}
		if [ -n "$found" ]; then
			nothing=0
			seen="$seen
$found"
			pids=$(echo "$found" | cut -d ' ' -f 1)
			case $looks in
			0) kill -s TERM $pids 2>/dev/null ;;
			[0-9] | [1-5][0-9]) ;; # it may have something to put away
			*) kill -s KILL $pids 2>/dev/null ;;
			esac
			looks=$((looks + 1))
		else
			nothing=$((nothing + 1))
		fi
		tick
	done
}
