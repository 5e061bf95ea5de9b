//go:build linux

package hosts

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/leftover"
	"github.com/swactor/provisioning/examples/sshfleet/internal/sshd"
)

func TestMain(m *testing.M) { os.Exit(leftover.Run(m)) }

func key(attempt provisioning.NodeAttemptID) provisioning.ExternalKey {
	return provisioning.ExternalKey{Run: "r", Node: "w-0", Attempt: attempt}
}

func newPool(t *testing.T, config Config) *Pool {
	p := NewPool(config)
	t.Cleanup(p.Close)
	return p
}

func TestClaimsOfAHost(t *testing.T) {
	t.Parallel()
	server := sshd.Start(t, "a")
	h, ctx := server.Host(), t.Context()
	p := newPool(t, Config{})
	first, second := key(1), key(2)

	state, err := p.Look(ctx, h, first.Token())
	require.NoError(t, err)
	require.Equal(t, Unused, state)
	require.Equal(t, &NoClaimError{"a", h.Dir, Unused}, p.End(ctx, h, first.Token(), true))
	claims, used, err := p.List(ctx, h)
	require.NoError(t, err)
	require.Empty(t, claims)
	require.False(t, used)

	for range 2 {
		state, err = p.Make(ctx, h, first, "echo cleaned >>../../../../../cleaned")
		require.NoError(t, err)
		require.Equal(t, Held, state)
	}
	state, err = p.Make(ctx, h, second, "")
	require.Equal(t, Absent, state)
	require.Equal(t, &BusyError{Host: "a", Token: first.Token()}, err)
	state, err = p.Look(ctx, h, second.Token())
	require.NoError(t, err)
	require.Equal(t, Absent, state)
	require.Equal(t, &NoClaimError{"a", h.Dir, Absent}, p.End(ctx, h, second.Token(), true))

	claims, used, err = p.List(ctx, h)
	require.NoError(t, err)
	require.True(t, used)
	require.Len(t, claims, 1)
	require.Equal(t, Held, claims[0].State)
	require.EqualValues(t, "w-0", claims[0].About.Node)

	for range 2 {
		require.NoError(t, p.End(ctx, h, first.Token(), true))
	}
	text, err := os.ReadFile(server.Home() + "/cleaned")
	require.NoError(t, err)
	require.Equal(t, "cleaned\n", string(text))
	state, err = p.Make(ctx, h, first, "")
	require.NoError(t, err)
	require.Equal(t, Spent, state)
	state, err = p.Make(ctx, h, second, "")
	require.NoError(t, err)
	require.Equal(t, Held, state)
}
