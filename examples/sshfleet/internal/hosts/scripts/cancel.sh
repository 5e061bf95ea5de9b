# Ends the agent of the claim, and sees to it that none is started later.
if [ -d "$h" ]; then
	: >"$h/cancelled"
	mkdir "$h/lock" 2>/dev/null || stop
elif [ ! -d "$spent" ]; then
	stop # it may run though its claim was moved
fi
echo cancelled
