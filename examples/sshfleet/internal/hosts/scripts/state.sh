# Says how far the agent of the claim has come.
if [ ! -d "$h" ] || [ -d "$spent" ]; then
	echo lost
elif [ -e "$h/cancelled" ]; then
	echo cancelled
elif [ -d "$h/lock" ]; then
	echo started
else
	echo new
fi
