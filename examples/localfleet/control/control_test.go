package control

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/status"
)

// told is a controller that keeps what it was asked.
type told struct {
	groups  []provisioning.NodeGroupSpec
	planned int
	drained int
	kind    string
	pick    uint64
}

func (c *told) Status() status.Status {
	return status.Status{Run: "r", Slots: []status.Slot{{Node: "w-0"}}}
}

func (c *told) Slot(node string) (status.Slot, bool) {
	return status.Slot{Node: node, Why: "because"}, node == "a&b=c d"
}

func (c *told) Plan(groups []provisioning.NodeGroupSpec) (Plan, error) {
	c.groups = groups
	c.planned++
	if len(groups) > 0 && groups[0].Count < 0 {
		return Plan{}, errors.New("fleet: refused")
	}
	return Plan{Generation: 7, Steps: []Step{{Node: "w-0", What: "Insert"}}, Waiting: 2}, nil
}

func (c *told) Drain() { c.drained++ }

func (c *told) Break(kind string, pick uint64) (string, error) {
	c.kind, c.pick = kind, pick
	return "broke it", nil
}

// shortDir is a directory whose name leaves room for a socket.
func shortDir(t *testing.T) string {
	dir, err := os.MkdirTemp("", "control")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

func TestCommandsReachTheController(t *testing.T) {
	dir, c, ctx := shortDir(t), new(told), t.Context()
	server, err := Serve(dir, c)
	require.NoError(t, err)
	info, err := os.Stat(socket(dir))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm(), "for its owner alone")
	client := NewClient(dir)

	s, err := client.Status(ctx)
	require.NoError(t, err)
	require.Equal(t, "w-0", s.Slots[0].Node)
	slot, err := client.Slot(ctx, "a&b=c d")
	require.NoError(t, err)
	require.Equal(t, status.Slot{Node: "a&b=c d", Why: "because"}, slot)
	_, err = client.Slot(ctx, "x")
	require.EqualError(t, err, `fleet: there is no slot "x"`)

	plan, err := client.Plan(ctx, nil)
	require.NoError(t, err)
	require.Equal(t, Plan{Generation: 7, Steps: []Step{{Node: "w-0", What: "Insert"}}, Waiting: 2}, plan)
	require.Nil(t, c.groups, "none is not the same as an empty list")
	_, err = client.Plan(ctx, []provisioning.NodeGroupSpec{})
	require.NoError(t, err)
	require.NotNil(t, c.groups)
	groups := []provisioning.NodeGroupSpec{{GroupID: "w", Count: -1, Shape: provisioning.NodeShape{Image: "v1"}}}
	_, err = client.Plan(ctx, groups)
	require.EqualError(t, err, "fleet: refused")
	require.Equal(t, groups, c.groups)

	what, err := client.Break(ctx, "machine", 1<<63)
	require.NoError(t, err)
	require.Equal(t, "broke it", what)
	require.Equal(t, "machine", c.kind)
	require.Equal(t, uint64(1<<63), c.pick)

	require.NoError(t, client.Drain(ctx))
	require.Equal(t, 1, c.drained)

	require.NoError(t, server.Close(ctx))
	require.NoFileExists(t, socket(dir))
	_, err = client.Status(ctx)
	require.ErrorIs(t, err, ErrNoController)
}

func TestNoController(t *testing.T) {
	dir, ctx := shortDir(t), t.Context()
	_, err := NewClient(dir).Status(ctx)
	require.ErrorIs(t, err, ErrNoController)
	require.ErrorIs(t, NewClient(filepath.Join(dir, "none")).Drain(ctx), ErrNoController)

	// One that was killed leaves its socket, which the next one replaces.
	listener, err := net.Listen("unix", socket(dir))
	require.NoError(t, err)
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	require.NoError(t, listener.Close())
	require.FileExists(t, socket(dir))
	_, err = NewClient(dir).Status(ctx)
	require.ErrorIs(t, err, ErrNoController)
	server, err := Serve(dir, new(told))
	require.NoError(t, err)
	_, err = NewClient(dir).Status(ctx)
	require.NoError(t, err)
	require.NoError(t, server.Close(ctx))
}

// One that ends while it is asked hangs up.
func TestControllerHangsUp(t *testing.T) {
	dir := shortDir(t)
	listener, err := net.Listen("unix", socket(dir))
	require.NoError(t, err)
	go func() {
		conn, err := listener.Accept()
		if err == nil {
			conn.Read(make([]byte, 1))
			conn.Close()
		}
	}()
	_, err = NewClient(dir).Status(t.Context())
	require.ErrorIs(t, err, ErrNoController)
	require.NoError(t, listener.Close())
}

func TestLongPathOfASocket(t *testing.T) {
	_, err := Serve(filepath.Join(shortDir(t), strings.Repeat("x", maxSocketPath)), new(told))
	require.ErrorContains(t, err, "the path of the control socket is longer than 103 bytes")
}
