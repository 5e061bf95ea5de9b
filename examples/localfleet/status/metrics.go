package status

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/swactor/provisioning"
)

// writeMetrics writes the text format of Prometheus, version 0.0.4. All
// names begin with that of the fleet; the README of the example lists them.
func (f *Fleet) writeMetrics(out io.Writer) error {
	s := f.Status()
	j := f.Journal
	j.mu.Lock()
	c := j.counts
	j.mu.Unlock()
	host := f.Host.Status()

	m := metrics{out: bufio.NewWriter(out), prefix: f.Name + "_"}
	m.family("info", "gauge", "Which run this is; always 1.")
	m.sample("info", 1, "run", s.Run)
	m.single("start_time_seconds", "gauge", "When the run began, in seconds since 1970.", float64(s.BeganAt.UnixMilli())/1000)
	m.single("generation", "gauge", "Generation of the latest wish.", float64(s.Generation))
	m.single("observed_generation", "gauge", "Generation that a pass last compared with.", float64(s.Observed))
	m.single("converged", "gauge", "1 if the latest wish is fulfilled.", truth(s.Converged))
	m.single("draining", "gauge", "1 if the fleet is being given back.", truth(s.Draining))
	m.single("driving", "gauge", "1 while passes are run.", truth(s.Ended == ""))
	m.single("desired_nodes", "gauge", "Nodes wished for.", float64(s.Desired))
	m.single("ready_nodes", "gauge", "Nodes wished for that are ready.", float64(s.Ready))
	m.single("held_slots", "gauge", "Slots that have a machine, or may have.", float64(s.Held))
	m.single("progress_ratio", "gauge", "Steps that are done, of those of all slots; 0 to 1.", s.Progress)

	type place struct{ group, stage, phase string }
	slots := make(map[place]int)
	for _, slot := range s.Slots {
		slots[place{slot.Group, slot.Stage, string(slot.Phase)}]++
	}
	m.family("slots", "gauge", "Slots by group, stage and phase; what is 0 is left out.")
	for _, p := range slices.SortedFunc(maps.Keys(slots), func(a, b place) int {
		return strings.Compare(a.group+"\x00"+a.stage+"\x00"+a.phase, b.group+"\x00"+b.stage+"\x00"+b.phase)
	}) {
		m.sample("slots", float64(slots[p]), "group", p.group, "stage", p.stage, "phase", p.phase)
	}

	m.family("operations_total", "counter", "Calls of the backend dispatched.")
	for kind := provisioning.CreateLease; kind <= provisioning.DestroyLease; kind++ {
		m.sample("operations_total", float64(c.operations[kind]), "operation", kind.String())
	}
	m.family("operation_failures_total", "counter", "Calls of the backend that failed, by class.")
	for kind := provisioning.CreateLease; kind <= provisioning.DestroyLease; kind++ {
		for class := provisioning.ClassDefinite; class <= provisioning.ClassLeaseLost; class++ {
			m.sample("operation_failures_total", float64(c.failures[kind][class]), "operation", kind.String(), "class", class.String())
		}
	}
	m.family("observations_total", "counter", "Observations, by whether they were applied.")
	m.sample("observations_total", float64(c.applied), "result", "applied")
	m.sample("observations_total", float64(c.notApplied), "result", "not_applied")
	m.single("operations_expired_total", "counter", "Calls of the backend that outlived their deadline.", float64(host.Driver.Expired))
	m.single("passes_total", "counter", "Passes run.", float64(c.passes))
	m.single("attempts_total", "counter", "Attempts begun.", float64(c.attempts))
	m.single("attempt_failures_total", "counter", "Attempts that failed.", float64(c.failed))
	m.single("nodes_lost_total", "counter", "Nodes reported as lost.", float64(c.lost))
	m.single("faults_total", "counter", "Times that a slot could not go on.", float64(c.faults))
	m.family("reloads_total", "counter", "Times that the shape file was read, by whether it was taken.")
	m.sample("reloads_total", float64(c.reloads), "result", "accepted")
	m.sample("reloads_total", float64(c.refused), "result", "refused")
	m.family("time_to_ready_seconds", "summary", "From the start of an attempt until its node was ready.")
	m.sample("time_to_ready_seconds_sum", c.readySeconds)
	m.sample("time_to_ready_seconds_count", float64(c.ready))
	return m.out.Flush()
}

func truth(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// metrics writes families of samples. Errors are kept by the writer until the
// end.
type metrics struct {
	out    *bufio.Writer
	prefix string // of every name
}

func (m *metrics) family(name, kind, help string) {
	fmt.Fprintf(m.out, "# HELP %[1]s%[2]s %[3]s\n# TYPE %[1]s%[2]s %[4]s\n", m.prefix, name, help, kind)
}

func (m *metrics) single(name, kind, help string, value float64) {
	m.family(name, kind, help)
	m.sample(name, value)
}

var labelEscapes = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

// sample writes one line; labels are names and values in turn.
func (m *metrics) sample(name string, value float64, labels ...string) {
	m.out.WriteString(m.prefix + name)
	for i := 0; i < len(labels); i += 2 {
		before := ","
		if i == 0 {
			before = "{"
		}
		fmt.Fprintf(m.out, `%s%s="%s"`, before, labels[i], labelEscapes.Replace(labels[i+1]))
	}
	if len(labels) > 0 {
		m.out.WriteByte('}')
	}
	fmt.Fprintf(m.out, " %s\n", strconv.FormatFloat(value, 'g', -1, 64))
}
