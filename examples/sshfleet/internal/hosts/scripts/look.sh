# Says what there is of a claim, after which nobody who tries to make it can. Where
# no claim was ever made it says so: one that was may be hidden.
fence
if [ -d "$spent" ]; then
	if [ -d "$c" ]; then echo ending; else echo spent; fi
elif [ -d "$h" ]; then
	echo held
elif [ ! -d "$dir/spent" ]; then
	echo unused
else
	rmdir "$c" 2>/dev/null
	echo absent
fi
