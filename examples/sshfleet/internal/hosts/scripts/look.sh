# Says what there is of a claim, after which nobody who tries to make it can.
fence
if [ -d "$spent" ]; then
	if [ -d "$c" ]; then echo ending; else echo spent; fi
elif [ -d "$h" ]; then
	echo held
else
	rmdir "$c" 2>/dev/null
	echo absent
fi
