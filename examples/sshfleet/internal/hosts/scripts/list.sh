# Lists all claims of this host.
[ -d "$dir/spent" ] || echo unused
for c in "$dir"/claims/*; do
	[ -d "$c" ] || continue
	readable "$c"
	t=${c##*/}
	state=trying
	[ ! -d "$c/held" ] || state=held
	[ ! -d "$dir/spent/$t" ] || state=ending
	about=
	[ ! -r "$c/held/about" ] || read -r about <"$c/held/about"
	printf '%s %s %s\n' "$t" "$state" "$about"
done
echo end
