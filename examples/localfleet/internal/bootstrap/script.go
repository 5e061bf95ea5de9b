// Package bootstrap turns a machine into a node over SSH: it checks the
// machine, starts the agent, and follows what it prints.
package bootstrap

import (
	_ "embed"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/agent"
	"github.com/swactor/provisioning/examples/localfleet/remote"
)

// DefaultCommand is started where a shape names no StartSwactorCommand: the
// agent of this example, which every machine has in its PATH.
const DefaultCommand = "localfleet " + agent.Command

// sessionVariable marks the agent's process on the machine.
const sessionVariable = "SWACTOR_SESSION"

// Of the scripts.
const (
	exitCancelled = 77
	wordCancelled = "cancelled"
	wordStarted   = "started"
)

// shell reads a script from its input: what is secret in it must not stand on
// a command line, which everybody on the machine can read.
const shell = "sh -s"

// Every script works in the directory of the session, whose name is made of
// the key of the attempt alone. The lock in there is taken once and never
// given back; who has it starts the agent, or has cancelled.
//
//	lock/      somebody has started the agent, or forbidden it
//	token run  what the agent needs
//	pid exit   its process, and its exit status once it has ended
//	stdout stderr
//	cancelled  the session is over
var (
	//go:embed start.sh
	startScript string
	//go:embed run.sh
	runScript string
	//go:embed cancel.sh
	cancelScript string
)

const (
	lookScript   = `if [ -e "$d/cancelled" ]; then echo ` + wordCancelled + `; elif [ -d "$d/lock" ]; then echo ` + wordStarted + "; fi\n"
	followScript = "exec tail -q -n +1 -F -- %s"
	awaitScript  = `while [ ! -s "$d/exit" ]; do sleep 0.2; done; cat "$d/exit"; tail -n 1 "$d/stderr"`
)

// Session returns the name of the bootstrap session of an attempt. There is
// one in an attempt's life, and who asks again gets it again (B1).
func Session(key provisioning.ExternalKey) provisioning.BootstrapSessionID {
	return provisioning.BootstrapSessionID(key.TokenFor("bootstrap"))
}

// within returns a script that knows the session's directory as $d.
func within(session provisioning.BootstrapSessionID, script string) string {
	return "session=" + remote.Quote(string(session)) + "\nd=\"$HOME/.swactor/$session\"\n" + script
}

var variableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// Check returns why a spec could not be booted, or nil, so that no machine is
// rented for it.
func Check(spec provisioning.LogicalNodeSpec) error {
	for _, name := range slices.Sorted(maps.Keys(spec.Boot.Env)) {
		if !variableName.MatchString(name) {
			return fmt.Errorf("localfleet: boot.env: %q is no name of a variable", name)
		}
	}
	texts := slices.Concat([]string{spec.Boot.StartSwactorCommand}, spec.Boot.VerifyCommands, spec.Boot.Args,
		spec.Boot.StdoutSources, spec.Boot.StderrSources, slices.Collect(maps.Values(spec.Boot.Env)))
	if slices.ContainsFunc(texts, func(s string) bool { return strings.ContainsRune(s, 0) }) {
		return fmt.Errorf("localfleet: boot: a NUL byte cannot be told to a shell")
	}
	if len(spec.Boot.Mounts) > 0 {
		return fmt.Errorf("localfleet: boot.mounts: these machines cannot mount")
	}
	return nil
}

// start returns the script that starts the agent, or finds it started.
func (j *Job) start() string {
	var run strings.Builder
	variables := map[string]string{
		agent.Run: string(j.Key.Run), agent.Node: string(j.Key.Node), agent.Attempt: strconv.FormatUint(uint64(j.Key.Attempt), 10),
		agent.Address: j.JoinAddress, sessionVariable: string(j.session()),
	}
	for _, set := range []map[string]string{j.Spec.Boot.Env, variables} { // ours win
		for _, name := range slices.Sorted(maps.Keys(set)) {
			fmt.Fprintf(&run, "export %s=%s\n", name, remote.Quote(set[name]))
		}
	}
	fmt.Fprintf(&run, "export %s=\"$d/token\"\n", agent.TokenFile)
	command := j.Spec.Boot.StartSwactorCommand // one simple command, in the words of a shell
	if command == "" {
		command = DefaultCommand
	}
	for _, argument := range j.Spec.Boot.Args {
		command += " " + remote.Quote(argument)
	}
	fmt.Fprintf(&run, "swactor() { exec %s; }\n", command)
	run.WriteString(runScript)
	return within(j.session(), fmt.Sprintf("token=%s\nrun=%s\n",
		remote.Quote(string(j.Token)), remote.Quote(within(j.session(), run.String())))+startScript)
}

// follow returns the command that prints a stream of the agent from its
// beginning on, with whatever else the spec counts to it.
func (j *Job) follow(stream string, sources []string) string {
	files := `"$d/` + stream + `"`
	for _, source := range sources {
		files += " " + remote.Quote(source)
	}
	return within(j.session(), fmt.Sprintf(followScript, files))
}
