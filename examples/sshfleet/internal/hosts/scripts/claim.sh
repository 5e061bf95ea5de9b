# Makes the claim, or finds it made. First it shows that it tries, then it looks
# for others: of two who try at once each sees the other, or one of them has not
# looked yet and will. So there are never two claims; at worst there is none, and
# both come again. Before the last step it asks back: whoever has gone away since,
# gets no claim that he does not know of.
withdraw() {
	rm -rf "$try"
	rmdir "$c" 2>/dev/null
}
# alive reports whether the shell of a try is there: not another one of its number.
alive() {
	number=${1##*/try.}
	kill -s 0 "${number%.*}" 2>/dev/null && [ "$(began "${number%.*}")" = "${number#*.}" ]
}
try=$c/try.$$.$(began "$$")
trap 'withdraw; exit 1' HUP INT TERM
mkdir -p "$dir/spent" "$try/work" || exit
if [ -d "$spent" ]; then
	withdraw
	if [ -d "$c" ]; then echo ending; else echo spent; fi
	exit 0
fi
if [ -d "$h" ]; then
	withdraw
	echo held
	exit 0
fi
for other in "$dir"/claims/*; do
	[ "$other" != "$c" ] || continue
	for dead in "$other"/try.*; do # of a shell that was killed
		[ ! -d "$dead" ] || alive "$dead" || take_away "$dead"
	done
	rmdir "$other" 2>/dev/null
	if [ -d "$other" ]; then
		withdraw
		echo "busy ${other##*/}"
		exit 0
	fi
done
printf '%s\n' "$about" >"$try/about" && printf %s "$cleanup" >"$try/cleanup" || {
	withdraw
	exit 1
}
echo ready
read -r answer
if [ "$answer" = go ] && mv "$try" "$h"; then
	echo held
else
	withdraw
	echo fenced
fi
