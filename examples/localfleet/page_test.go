//go:build chromium && linux

package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning/examples/localfleet/internal/browser"
)

// What the page shows of real machines: they come up, one is killed, and heals.
func TestPageOfARealFleet(t *testing.T) {
	p := newPlace(t, "")
	gate := filepath.Join(filepath.Dir(p.shape), "gate") // opens when the page has been looked at
	p.write(wish(trainers, fmt.Sprintf("- {groupId: worker, count: 4, shape: {image: \"worker:v1\"}, boot: {verifyCommands: [%q]}}\n",
		"until test -e "+gate+"; do sleep 0.1; done")))
	c := p.up("-http", "127.0.0.1:0")
	text, _ := c.output()
	b := browser.Open(t, pageAt.FindStringSubmatch(text)[1])
	b.Sees(`document.querySelectorAll('.slot[data-phase=rising][data-stage=EndpointKnown]').length === 4`)
	b.Sees(`document.getElementById('ready').textContent === '2 of 6'`)
	b.Picture("real-1-rising")
	require.NoError(t, os.WriteFile(gate, nil, 0o600))
	b.Sees(`document.querySelectorAll('.slot[data-stage=Dormant][data-phase=ready]').length === 6`)
	b.Sees(`document.getElementById('state').textContent === 'converged'`)
	b.Picture("real-2-converged")

	pid := slices.Min(slices.Collect(maps.Keys(p.machines())))
	require.NoError(t, syscall.Kill(-pid, syscall.SIGKILL))
	died := fmt.Sprintf("process %d of the machine is gone", pid)
	b.Sees(`document.getElementById('events').textContent.includes(` + strconv.Quote(died) + `)`)
	b.Picture("real-3-healing")
	b.Sees(`document.querySelectorAll('.slot[data-attempt="7"][data-stage=Dormant][data-phase=ready]').length === 1`)
	b.Sees(`document.getElementById('state').textContent === 'converged'`)
	b.Sees(`document.querySelectorAll('.slot .due small').length === 6 && [...document.querySelectorAll('.slot .due small')]
		.filter(e => e.textContent === '2 attempts, 1 failed').length === 1`)
	require.NotContains(t, p.machines(), pid)
	require.Len(t, p.machines(), 6)

	p.ok("drain")
	require.Equal(t, exitOK, c.end())
	b.Sees(`document.getElementById('state').textContent === 'connection lost'`)
	b.Picture("real-4-lost")
}
