//go:build linux

package hosts

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/ssh"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/remote"
	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
)

// deaf is a host that has no SSH: it hangs up at once, or says nothing until it is
// closed.
type deaf struct {
	*inventory.Host
	listener *net.TCPListener
	came     atomic.Int32 // connections
}

func newDeaf(t *testing.T, name string, hangUp bool) *deaf {
	t.Helper()
	listener, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	_, private, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	key, err := ssh.NewSignerFromKey(private)
	require.NoError(t, err)
	d := &deaf{listener: listener, Host: &inventory.Host{Name: name, User: "u", Key: key, HostKeys: []ssh.PublicKey{key.PublicKey()},
		Endpoint: provisioning.SSHEndpoint{Host: "127.0.0.1", Port: uint16(listener.Addr().(*net.TCPAddr).Port)}}}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		var open []net.Conn
		for {
			conn, err := listener.Accept()
			if err != nil {
				break
			}
			d.came.Add(1)
			if open = append(open, conn); hangUp {
				conn.Close()
			}
		}
		for _, conn := range open {
			conn.Close()
		}
	}()
	t.Cleanup(func() { listener.Close(); <-ended })
	return d
}

// No more connections are made at once than may be: while one is being made, for as
// long as that takes, the next one is not begun.
func TestMaxDials(t *testing.T) {
	t.Parallel()
	first, second := newDeaf(t, "first", false), newDeaf(t, "second", false)
	p := newPool(t, Config{MaxDials: 1, SSH: remote.Config{ConnectTimeout: time.Hour}})
	p.hold = time.Hour
	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan error, 1)
	go func() { asked <- p.Reach(ctx, first.Host) }()
	for first.came.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	soon, stop := context.WithTimeout(t.Context(), 300*time.Millisecond) // within which it would be
	defer stop()
	require.ErrorIs(t, p.Reach(soon, second.Host), context.DeadlineExceeded)
	require.Zero(t, second.came.Load())
	cancel()
	require.ErrorIs(t, <-asked, context.Canceled)
}

// A host that could not be reached is asked again after a while, not before.
func TestRedial(t *testing.T) {
	t.Parallel()
	for redial, want := range map[time.Duration]int32{time.Hour: 1, time.Nanosecond: 2} {
		host := newDeaf(t, "a", true)
		p := newPool(t, Config{Redial: redial})
		require.Error(t, p.Reach(t.Context(), host.Host))
		require.Error(t, p.Reach(t.Context(), host.Host))
		require.Equal(t, want, host.came.Load())
	}
}

// One that keeps silent, which takes its time, is not asked again so soon.
func TestSilenceIsRemembered(t *testing.T) {
	t.Parallel()
	host := newDeaf(t, "a", false)
	p := newPool(t, Config{Redial: time.Nanosecond, SSH: remote.Config{ConnectTimeout: 100 * time.Millisecond}})
	require.ErrorIs(t, p.Reach(t.Context(), host.Host), context.DeadlineExceeded)
	require.Error(t, p.Reach(t.Context(), host.Host))
	require.EqualValues(t, 1, host.came.Load())
}
