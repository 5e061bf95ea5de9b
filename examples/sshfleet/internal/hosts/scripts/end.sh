# Ends the claim. First what runs under it, before anything is written: that may
# not be possible. Then for good, so that nobody makes it again, and what was
# started meanwhile. Then what it leaves behind, and at last itself.
if [ ! -d "$c" ] && [ "$bury" = no ]; then
	if [ -d "$spent" ]; then
		echo gone
	elif [ -d "$dir/spent" ]; then
		echo absent
	else
		echo unused
	fi
	exit 0
fi
[ ! -d "$h" ] && [ "$bury" = no ] || stop
mkdir -p "$spent" || exit
fence
if [ -d "$h" ]; then
	stop
	if [ "$clean" = yes ] && [ -s "$h/cleanup" ] && [ ! -e "$h/cleaned" ]; then
		# Marked: who ends this claim again ends the clean-up too, and begins anew.
		note || exit
		if (cd "$h/work" && exec env SWACTOR_CLAIM="$t" sh "$h/cleanup") </dev/null >"$h/cleanup.out" 2>&1; then
			: >"$h/cleaned"
		else
			echo "failed with status $?: $(tail -n 1 "$h/cleanup.out")"
			exit 0
		fi
		stop
	fi
fi
rm -rf "$c" || exit
# Nobody asks about a token after so long.
find "$dir/spent/." ! -name . -prune -mtime +30 -exec rmdir {} \; 2>/dev/null
echo gone
