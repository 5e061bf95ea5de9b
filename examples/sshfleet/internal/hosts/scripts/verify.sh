# Runs a command that says whether the host is fit, in the agent's environment.
printf '%s%s\n' "$environment" "$command" >"$h/verify.$$" && note || exit
(cd "$h/work" && exec env SWACTOR_CLAIM="$t" sh "$h/verify.$$") </dev/null
status=$?
rm -f "$h/verify.$$"
exit "$status"
