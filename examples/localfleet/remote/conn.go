// Package remote runs commands on machines over SSH.
package remote

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/swactor/provisioning"
)

// Defaults of a [Config].
const (
	DefaultConnectTimeout = 10 * time.Second
	DefaultKeepAlive      = 5 * time.Second
)

// Config says how to connect. Zero durations mean their defaults.
type Config struct {
	Key ssh.Signer // to log in with
	// ConnectTimeout bounds dialling and handshake together. Default 10 s.
	ConnectTimeout time.Duration
	// KeepAlive is how often a machine is asked whether it is there; when
	// it has not answered until the next time, the connection is cut.
	// Default 5 s.
	KeepAlive time.Duration
}

// Target is the machine of one attempt.
type Target struct {
	Endpoint provisioning.SSHEndpoint
	User     string
	// HostKeys are the keys that the machine may show, one of which it has
	// to.
	HostKeys []ssh.PublicKey
}

// Errors of [Dial].
var (
	// ErrHostKey: another machine answers than the one that was rented.
	ErrHostKey = errors.New("fleet: another machine answers at this address")
	// ErrLogin: the machine does not let us in.
	ErrLogin = errors.New("fleet: the machine refuses the login")
)

// Conn is a connection to a machine. Its methods are safe for concurrent use.
type Conn struct {
	client  *ssh.Client
	closed  chan struct{}
	close   sync.Once
	running sync.WaitGroup
}

// Dial connects. It sends nothing to a machine that has another key than the
// target's.
func Dial(ctx context.Context, config Config, target Target) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(config.ConnectTimeout, DefaultConnectTimeout))
	defer cancel()
	if len(target.HostKeys) == 0 {
		return nil, fmt.Errorf("%w: its key is not known", ErrHostKey)
	}
	address := target.Endpoint.String()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	wrongKey := false
	var algorithms []string // else a server with several keys may show another one
	for _, key := range target.HostKeys {
		algorithms = append(algorithms, algorithmsOf(key.Type())...)
	}
	transport, channels, requests, err := ssh.NewClientConn(conn, address, &ssh.ClientConfig{
		User: target.User,
		Auth: []ssh.AuthMethod{ssh.PublicKeys(config.Key)},
		HostKeyCallback: func(_ string, _ net.Addr, key ssh.PublicKey) error {
			wrongKey = !slices.ContainsFunc(target.HostKeys, func(known ssh.PublicKey) bool {
				return bytes.Equal(key.Marshal(), known.Marshal())
			})
			if wrongKey {
				return fmt.Errorf("%w: its key is %s, not %s", ErrHostKey, ssh.FingerprintSHA256(key), ssh.FingerprintSHA256(target.HostKeys[0]))
			}
			return nil
		},
		HostKeyAlgorithms: algorithms,
	})
	inTime := stop()
	switch {
	case err == nil && inTime:
	case err == nil:
		return nil, errors.Join(ctx.Err(), transport.Close())
	case wrongKey:
		conn.Close()
		return nil, fmt.Errorf("%w (%v)", ErrHostKey, err)
	case !inTime:
		return nil, fmt.Errorf("fleet: no SSH from %s in time: %w", address, ctx.Err())
	case strings.Contains(err.Error(), "unable to authenticate"): // the package has no type for it
		conn.Close()
		return nil, fmt.Errorf("%w: %w", ErrLogin, err)
	default:
		conn.Close()
		return nil, err
	}
	c := &Conn{client: ssh.NewClient(transport, channels, requests), closed: make(chan struct{})}
	c.running.Go(func() { c.keepAlive(cmp.Or(config.KeepAlive, DefaultKeepAlive)) })
	return c, nil
}

// algorithmsOf returns the ways to sign with a kind of key.
func algorithmsOf(keyType string) []string {
	if keyType == ssh.KeyAlgoRSA {
		return []string{ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256}
	}
	return []string{keyType}
}

// Close cuts the connection and whatever runs over it, and waits for the
// connection's own goroutines.
func (c *Conn) Close() {
	c.cut()
	c.running.Wait()
}

// Cut reports the end of the connection, whoever brought it about.
func (c *Conn) Cut() <-chan struct{} { return c.closed }

func (c *Conn) cut() {
	c.close.Do(func() { close(c.closed) })
	c.client.Close() // its error says that it was cut already
}

// keepAlive cuts the connection when the machine does not answer.
func (c *Conn) keepAlive(every time.Duration) {
	gone := make(chan struct{})
	c.running.Go(func() { c.client.Wait(); close(gone) })
	defer c.cut()
	answered := make(chan error, 1)
	answered <- nil
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-gone:
			return
		case <-c.closed:
			return
		}
		select {
		case err := <-answered:
			if err != nil {
				return
			}
			c.running.Go(func() {
				_, _, err := c.client.SendRequest("keepalive@openssh.com", true, nil) // refused is answered
				answered <- err
			})
		default:
			return // the last one is still out
		}
	}
}

// ExitError is a command that ended with another status than 0.
type ExitError struct {
	Status int
	Stderr string // the end of what it said
}

// Error gives the status and what the command said.
func (e *ExitError) Error() string {
	if e.Stderr == "" {
		return fmt.Sprintf("exit status %d", e.Status)
	}
	return fmt.Sprintf("exit status %d: %s", e.Status, e.Stderr)
}

// Run runs a command and returns what it printed. The error is an [*ExitError]
// if the command failed. Any other error says that nobody knows how the command
// ended: the connection broke, or ctx was done, which closes its session.
func (c *Conn) Run(ctx context.Context, command string, stdin io.Reader) (stdout string, err error) {
	var out, errs tail
	err = c.stream(ctx, command, stdin, &out, &errs)
	return out.String(), withStderr(err, &errs)
}

// Lines runs a command and hands over its output line by line until it ends:
// what it prints to stderr too, unless nobody wants that. The two are called
// from different goroutines. Errors are those of [Conn.Run].
func (c *Conn) Lines(ctx context.Context, command string, stdin io.Reader, stdout, stderr func(string)) error {
	out := lineWriter{line: stdout}
	if stderr != nil {
		return c.stream(ctx, command, stdin, &out, &lineWriter{line: stderr})
	}
	var errs tail
	return withStderr(c.stream(ctx, command, stdin, &out, &errs), &errs)
}

// withStderr has an [*ExitError] say what the command said.
func withStderr(err error, stderr *tail) error {
	if exit, ok := errors.AsType[*ExitError](err); ok {
		exit.Stderr = stderr.String()
	}
	return err
}

// stream returns when the command has ended, the connection is cut or ctx is
// done, whether or not stdin has come to its end.
func (c *Conn) stream(ctx context.Context, command string, stdin io.Reader, stdout, stderr io.Writer) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	c.running.Go(func() { ended <- c.session(ctx, command, stdin, stdout, stderr) })
	select {
	case err := <-ended:
		return err
	case <-ctx.Done(): // a machine that hangs answers no request; its session ends with the connection
		return ctx.Err()
	}
}

func (c *Conn) session(ctx context.Context, command string, stdin io.Reader, stdout, stderr io.Writer) error {
	session, err := c.client.NewSession()
	if err != nil {
		return err
	}
	defer session.Close()
	defer context.AfterFunc(ctx, func() { session.Close() })()
	session.Stdout, session.Stderr = stdout, stderr
	if stdin != nil {
		// Not session.Stdin: Wait would wait for its end.
		pipe, err := session.StdinPipe()
		if err != nil {
			return err
		}
		go func() {
			io.Copy(pipe, stdin) // its error is that of the session
			pipe.Close()
		}()
	}
	err = session.Run(command)
	if exit, ok := errors.AsType[*ssh.ExitError](err); ok {
		return &ExitError{Status: exit.ExitStatus()}
	}
	return err
}
