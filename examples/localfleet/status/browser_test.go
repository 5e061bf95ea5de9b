//go:build chromium

package status

import (
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/internal/browser"
)

// open opens the page of a fleet.
func open(t *testing.T, f *testFleet) *tab {
	server := httptest.NewServer(Handler(f.Fleet, false))
	t.Cleanup(func() { // after the browser, which follows for as long as it can
		server.CloseClientConnections()
		server.Close()
	})
	return &tab{browser.Open(t, server.URL)}
}

type tab struct{ *browser.Tab }

// row is the element of a slot, as JavaScript.
func row(node string) string { return fmt.Sprintf("document.querySelector('[data-node=%q]')", node) }

// seesSlot waits until the row of a slot shows a stage in words and on its
// ladder.
func (b *tab) seesSlot(node string, stage provisioning.Stage, phase Phase, attempt, rungs int) {
	b.Sees(fmt.Sprintf(`(row => row && row.dataset.phase === %q && row.dataset.attempt === "%d" &&
		row.querySelector('.stage').textContent.startsWith(%q) && row.querySelectorAll('.ladder b.on').length === %d)(%s)`,
		phase, attempt, stage.String(), rungs, row(node)))
}

// A node comes up rung by rung, dies, and comes up again under another attempt,
// and the page shows all of it without being loaded again.
func TestPageShowsANodeComeUpAndHeal(t *testing.T) {
	f := newTestFleet(t, provisioning.HostConfig{MaxInFlight: 1}, group("w", 2))
	f.fake.Script("w-0", provisioning.CreateLease, mustOutcome(t, "hang"), mustOutcome(t, "hang"))
	f.run()
	b := open(t, f)
	b.Sees(`document.getElementById('state').textContent === "converging"`)
	// One call at a time: while that of w-0 hangs, w-1 stays New.
	b.seesSlot("w-1", provisioning.StageNew, Rising, 2, 1)
	b.seesSlot("w-0", provisioning.StageLeaseRequested, Rising, 1, 2)
	b.Sees(`document.getElementById('ready').textContent === "0 of 2"`)
	b.Sees(row("w-1") + `.querySelector('.why').textContent.includes("MaxInFlight is reached")`)
	b.Picture("1-begun")

	f.release("w-0", provisioning.CreateLease)
	b.seesSlot("w-0", provisioning.StageBootstrapRunning, Rising, 1, 5)
	f.report("w-0", provisioning.Observation{Kind: provisioning.BootstrapProgress, Stage: provisioning.BootstrapStageBootChecking})
	b.Sees(row("w-0") + `.querySelector('.stage').textContent === "BootstrapRunning · BootChecking"`)
	b.Sees(`/^\d+ min \d+ s$/.test(` + row("w-0") + `.querySelector('.due span').textContent)`)
	f.join("w-0")
	f.join("w-1")
	b.seesSlot("w-0", provisioning.StageDormant, Ready, 1, 7)
	b.seesSlot("w-1", provisioning.StageDormant, Ready, 2, 7)
	b.Sees(`document.getElementById('state').textContent === "converged"`)
	b.Sees(`document.getElementById('bar').getAttribute('aria-valuenow') === "100"`)
	b.Picture("2-converged")

	f.report("w-0", provisioning.Observation{Kind: provisioning.NodeLost, Reason: "killed by the test"})
	b.Sees(`document.getElementById('events').textContent.includes("the node is lost: killed by the test")`)
	b.seesSlot("w-0", provisioning.StageLeaseRequested, Rising, 3, 2)
	b.Sees(`document.getElementById('ready').textContent === "1 of 2"`)
	b.Sees(row("w-0") + `.querySelector('.due small').textContent === "2 attempts, 1 failed"`)
	b.Picture("3-healing")
	f.release("w-0", provisioning.CreateLease)
	f.join("w-0")
	b.seesSlot("w-0", provisioning.StageDormant, Ready, 3, 7)
	b.Sees(`document.getElementById('state').textContent === "converged"`)
	b.Sees(`document.title === "2/2 converged – localfleet"`)

	// A slot that nobody wants any more leaves the page.
	f.wish.Generation, f.wish.Groups[0].Count = 2, 1
	require.NoError(t, f.Host.UpdateDesired(f.wish))
	b.Sees(row("w-1") + ` === null && ` + row("w-0") + ` !== null`)
	b.Picture("4-smaller")
}

// What a provider, an agent or a shape says is shown as it is, as text.
func TestPageShowsMarkupAsText(t *testing.T) {
	const name = `<img src=x onerror=window.taken=1><script>window.taken=1`
	g := group(name, 1)
	g.Shape.Image = `"><svg onload=window.taken=1>`
	g.Role = `<b>role</b>`
	f := newTestFleet(t, provisioning.HostConfig{}, g)
	f.run()
	f.Journal.Refused(`<i>fleet.yaml`, fmt.Errorf(`<script>window.taken=1</script>`))
	b := open(t, f)
	slot := provisioning.NewLogicalNodeID(name, 0)
	f.awaitStage(string(slot), provisioning.StageBootstrapRunning)
	f.report(slot, provisioning.Observation{Kind: provisioning.BootstrapFailed, Reason: `<img src=x onerror=window.taken=1>`})
	b.Sees(fmt.Sprintf(`document.querySelector('.name').textContent === %q`, slot))
	b.Sees(fmt.Sprintf(`document.querySelector('.slot .mono').textContent.includes(%q)`, g.Shape.Image))
	b.Sees(`[...document.querySelectorAll('#events .text')].some(e => e.textContent.includes('the attempt failed: the bootstrap failed: <img src=x onerror=window.taken=1>'))`)
	b.Sees(`document.getElementById('warning').textContent.includes('<script>window.taken=1</script>')`)
	require.Equal(t, "undefined", b.Text("window.taken"))
	require.Equal(t, "0", b.Text(`document.querySelectorAll('img, svg, b b, main i i, main script').length`))
	b.Picture("5-markup")

	// Not even a script that got into the page would run.
	require.Equal(t, "undefined", b.Text(`(() => {
		const s = document.createElement('script');
		s.textContent = 'window.taken = 1';
		document.body.append(s);
		return String(window.taken);
	})()`))
}

// The page says so when it is cut off, and goes on when the controller is back.
func TestPageSaysWhenItIsCutOff(t *testing.T) {
	f := newTestFleet(t, provisioning.HostConfig{}, group("w", 1))
	f.run()
	f.join("w-0")
	server, err := Serve("127.0.0.1:0", false, f.Fleet)
	require.NoError(t, err)
	b := open(t, f)
	b.Go(server.URL())
	b.Sees(`document.getElementById('state').textContent === "converged"`)
	address := strings.TrimSuffix(strings.TrimPrefix(server.URL(), "http://"), "/")
	require.NoError(t, server.Close(t.Context()))
	b.Sees(`document.getElementById('state').textContent === "connection lost"`)
	server, err = Serve(address, false, f.Fleet)
	require.NoError(t, err)
	b.Sees(`document.getElementById('state').textContent === "converged"`)
	b.Go("about:blank")
	require.NoError(t, server.Close(t.Context()))
}
