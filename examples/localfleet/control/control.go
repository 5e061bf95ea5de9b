// Package control is how commands talk to a running controller: HTTP over a
// Unix socket in the directory of the fleet, which only its owner can open.
package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/status"
)

// Controller is what can be asked.
type Controller interface {
	Status() status.Status
	Slot(node string) (status.Slot, bool)
	// Plan says what the next pass would do for these groups; nil means those
	// that are wished for.
	Plan(groups []provisioning.NodeGroupSpec) (Plan, error)
	// Drain begins to give everything back and returns.
	Drain()
	// Break breaks something on purpose and says what.
	Break(kind string, pick uint64) (string, error)
}

// Plan is a [provisioning.Plan] in words.
type Plan struct {
	Generation uint64 `json:"generation"`
	Steps      []Step `json:"steps"`
	// Waiting are slots of which the next pass only waits for something.
	Waiting int `json:"waiting"`
}

// Step is what the next pass does about a slot.
type Step struct {
	Node  string `json:"node"`
	What  string `json:"what"`
	Rule  string `json:"rule"`
	Why   string `json:"why"`
	Fault string `json:"fault,omitempty"` // why it cannot be done
}

// PlanOf puts a plan over a state in words.
func PlanOf(p provisioning.Plan, observed *provisioning.ClusterState) Plan {
	out := Plan{Generation: p.ObservedGeneration, Steps: []Step{}, Waiting: observed.Len()}
	counted := func(node provisioning.LogicalNodeID) {
		if _, ok := observed.Node(node); ok {
			out.Waiting--
		}
	}
	for _, a := range p.Actions {
		counted(a.Node)
		what := a.Kind.String()
		if a.Kind == provisioning.Dispatch {
			what = a.Operation.String()
		}
		if a.NewAttempt != 0 {
			what = fmt.Sprintf("%s attempt %d", what, a.NewAttempt)
		}
		out.Steps = append(out.Steps, Step{Node: string(a.Node), What: what, Rule: a.Rule.String(), Why: a.Rule.Why})
	}
	for _, f := range p.Faults {
		counted(f.Node)
		out.Steps = append(out.Steps, Step{Node: string(f.Node), Rule: f.Rule.String(), Why: f.Rule.Why, Fault: f.Err.Error()})
	}
	return out
}

// ErrNoController: none is running in this directory.
var ErrNoController = errors.New("fleet: no controller is running in this directory")

// maxSocketPath is what Linux and macOS both allow.
const maxSocketPath = 103

func socket(dir string) string { return filepath.Join(dir, "control.sock") }

// Server answers commands.
type Server struct {
	http   *http.Server
	served chan error
}

// Serve answers commands until Close. The caller holds the lock of the
// directory: a socket that is there is a dead controller's.
func Serve(dir string, c Controller) (*Server, error) {
	path := socket(dir)
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("fleet: the path of the control socket is longer than %d bytes: %s", maxSocketPath, path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	s := &Server{http: &http.Server{Handler: handler(c), ReadHeaderTimeout: 5 * time.Second}, served: make(chan error, 1)}
	go func() { s.served <- s.http.Serve(listener) }()
	return s, os.Chmod(path, 0o600) // its directory is closed to others too
}

// Close answers what has been asked and removes the socket.
func (s *Server) Close(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	if err != nil {
		err = errors.Join(err, s.http.Close())
	}
	if served := <-s.served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

func handler(c Controller) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { answer(w, c.Status(), nil) })
	mux.HandleFunc("GET /slot", func(w http.ResponseWriter, r *http.Request) {
		node := r.URL.Query().Get("node")
		slot, ok := c.Slot(node)
		if !ok {
			answer(w, nil, fmt.Errorf("fleet: there is no slot %q", node))
			return
		}
		answer(w, slot, nil)
	})
	mux.HandleFunc("POST /plan", func(w http.ResponseWriter, r *http.Request) {
		var groups []provisioning.NodeGroupSpec
		if err := json.NewDecoder(r.Body).Decode(&groups); err != nil {
			answer(w, nil, err)
			return
		}
		plan, err := c.Plan(groups)
		answer(w, plan, err)
	})
	mux.HandleFunc("POST /drain", func(w http.ResponseWriter, _ *http.Request) {
		c.Drain()
		answer(w, "draining", nil)
	})
	mux.HandleFunc("POST /break", func(w http.ResponseWriter, r *http.Request) {
		pick, err := strconv.ParseUint(r.URL.Query().Get("pick"), 10, 64)
		if err != nil {
			answer(w, nil, err)
			return
		}
		what, err := c.Break(r.URL.Query().Get("kind"), pick)
		answer(w, what, err)
	})
	return mux
}

// answer sends a value, or an error as text.
func answer(w http.ResponseWriter, value any, err error) {
	text, jsonErr := json.Marshal(value)
	if err = errors.Join(err, jsonErr); err != nil {
		http.Error(w, err.Error(), http.StatusUnprocessableEntity)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(text) // an error is that of a client that has gone
}

// Client asks a controller.
type Client struct{ http *http.Client }

// NewClient returns a client for the controller of a directory, whether one
// runs or not.
func NewClient(dir string) *Client {
	return &Client{&http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket(dir))
		},
		DisableKeepAlives: true,
	}}}
}

// Status asks for everything. All methods return [ErrNoController] if none is
// running.
func (c *Client) Status(ctx context.Context) (s status.Status, err error) {
	return s, c.ask(ctx, http.MethodGet, "/status", nil, &s)
}

// Slot asks about one slot.
func (c *Client) Slot(ctx context.Context, node string) (s status.Slot, err error) {
	return s, c.ask(ctx, http.MethodGet, "/slot?node="+url.QueryEscape(node), nil, &s)
}

// Plan asks what the next pass would do. See [Controller].
func (c *Client) Plan(ctx context.Context, groups []provisioning.NodeGroupSpec) (p Plan, err error) {
	return p, c.ask(ctx, http.MethodPost, "/plan", groups, &p)
}

// Drain asks for everything to be given back, and does not wait for it.
func (c *Client) Drain(ctx context.Context) error {
	var done string
	return c.ask(ctx, http.MethodPost, "/drain", nil, &done)
}

// Break asks for something to be broken.
func (c *Client) Break(ctx context.Context, kind string, pick uint64) (what string, err error) {
	query := url.Values{"kind": {kind}, "pick": {strconv.FormatUint(pick, 10)}}
	return what, c.ask(ctx, http.MethodPost, "/break?"+query.Encode(), nil, &what)
}

func (c *Client) ask(ctx context.Context, method, path string, question, result any) error {
	body, err := json.Marshal(question)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, method, "http://controller"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	response, err := c.http.Do(request)
	switch {
	// A dead controller leaves its socket behind, and one that ends hangs up.
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET),
		errors.Is(err, syscall.EPIPE), errors.Is(err, io.EOF):
		return ErrNoController
	case err != nil:
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return errors.New(strings.TrimSpace(string(text)))
	}
	return json.Unmarshal(text, result)
}
