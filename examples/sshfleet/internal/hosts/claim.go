package hosts

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
)

// State is what there is of a claim on a host.
type State string

// The states.
const (
	Absent State = "absent"
	Unused State = "unused" // so is it, and no claim was ever made here
	Trying State = "trying" // somebody is about to make it, or died while he did
	Held   State = "held"
	Ending State = "ending" // it is spent, and what it leaves behind is not gone
	Spent  State = "spent"  // it was there, is gone and will not be again
)

// About says whose claim it is, to people. It is told apart by its token alone.
type About struct {
	Run     provisioning.RunID         `json:"run"`
	Node    provisioning.LogicalNodeID `json:"node"`
	Attempt provisioning.NodeAttemptID `json:"attempt"`
	Since   time.Time                  `json:"since"` // by the clock of the controller
}

// Claim is one claim that was found on a host.
type Claim struct {
	Token string
	State State
	About About // empty while somebody tries, and if it cannot be read
}

// ErrInDoubt: nobody knows whether the claim was made.
var ErrInDoubt = errors.New("sshfleet: it is not known whether the claim was made")

// NoClaimError: there is neither the claim nor the mark that it was ended.
type NoClaimError struct {
	Host, Dir string
	State     State // Absent or Unused
}

// Error says what that means of a claim that was there.
func (e *NoClaimError) Error() string {
	what := fmt.Sprintf("neither the claim nor the mark that it was ended is in %s", e.Dir)
	if e.State == Unused {
		what = fmt.Sprintf("there are no claims in %s, and none ever were", e.Dir)
	}
	return fmt.Sprintf("sshfleet: host %s: %s: if there was one, it was moved, or is not mounted", e.Host, what)
}

// BusyError: somebody else has the host, or tries to.
type BusyError struct {
	Host  string
	Token string // of the other claim
}

// Error names both.
func (e *BusyError) Error() string {
	return fmt.Sprintf("sshfleet: host %s has the claim %s", e.Host, e.Token)
}

// Make makes the claim of a key on a host and returns [Held]; it returns what is
// there if there is something of that key. The error is [ErrInDoubt] if the
// claim may have been made all the same; any other promises that it was not, and
// will not be.
//
// That promise needs no time to settle (B3). A script that was sent over a
// connection that was cut may begin at any time later, but it asks back before
// it makes the claim, and nobody answers. Only what has asked and was answered
// can be under way, and that can be seen on the host: [Pool.Look] keeps it from
// having its effect, or finds that it had.
func (p *Pool) Make(ctx context.Context, h *inventory.Host, key provisioning.ExternalKey, cleanup string) (State, error) {
	about, err := json.Marshal(About{Run: key.Run, Node: key.Node, Attempt: key.Attempt, Since: time.Now().UTC()})
	if err != nil {
		return Absent, err
	}
	// Who has gone does not answer, and who has answered does not go with a
	// promise.
	var mu sync.Mutex
	gone, answered := false, false
	var refused error
	said, err := p.talk(ctx, h, script(h, key.Token(), "claim", variables{"about": string(about), "cleanup": cleanup}),
		func(line string) (string, bool) {
			if line != "ready" {
				return "", false
			}
			mu.Lock()
			defer mu.Unlock()
			if gone {
				return "", true
			}
			if p.config.Claiming != nil {
				if refused = p.config.Claiming(h); refused != nil {
					return "no\n", true
				}
			}
			answered = true
			return "go\n", true
		})
	mu.Lock()
	gone = true
	doubt := answered
	mu.Unlock()
	word, rest, _ := strings.Cut(said, " ")
	switch {
	case refused != nil:
		return Absent, fmt.Errorf("sshfleet: host %s: no claim was made: %w", h.Name, refused)
	case err == nil && (State(word) == Held || State(word) == Ending || State(word) == Spent):
		return State(word), nil
	case err == nil && word == "busy":
		return Absent, &BusyError{Host: h.Name, Token: rest}
	case err == nil && word == "fenced":
		return Absent, fmt.Errorf("sshfleet: host %s: the claim was withdrawn", h.Name)
	case doubt:
		return Absent, fmt.Errorf("%w: host %s: %w", ErrInDoubt, h.Name, unfinished(said, err))
	}
	return Absent, fmt.Errorf("sshfleet: host %s: cannot make a claim: %w", h.Name, unfinished(said, err))
}

// Look says what there is of a claim, and keeps whoever tries to make it at that
// moment from making it.
func (p *Pool) Look(ctx context.Context, h *inventory.Host, token string) (State, error) {
	said, err := p.talk(ctx, h, script(h, token, "look", nil), nil)
	switch state := State(said); {
	case err == nil && (state == Absent || state == Unused || state == Held || state == Ending || state == Spent):
		return state, nil
	default:
		return "", fmt.Errorf("sshfleet: host %s: cannot look for a claim: %w", h.Name, unfinished(said, err))
	}
}

// End ends a claim: it stops whatever runs under it, cleans up, and returns nil
// once nothing is left of it but the mark that it was there, also if that is all
// there was. The error is a [*NoClaimError] if there is not even that. Without
// cleanup the clean-up command is left out.
func (p *Pool) End(ctx context.Context, h *inventory.Host, token string, cleanup bool) error {
	return p.end(ctx, h, token, cleanup, false)
}

// Bury is [Pool.End] for a claim that is known to be lost: if it is not there, what
// bears its mark is stopped, and the mark that it was ended is made.
func (p *Pool) Bury(ctx context.Context, h *inventory.Host, token string) error {
	return p.end(ctx, h, token, true, true)
}

func (p *Pool) end(ctx context.Context, h *inventory.Host, token string, cleanup, bury bool) error {
	word := map[bool]string{false: "no", true: "yes"}
	said, err := p.talk(ctx, h, script(h, token, "end", variables{"clean": word[cleanup], "bury": word[bury]}), nil)
	if state := State(said); err == nil && (state == Absent || state == Unused) {
		return &NoClaimError{Host: h.Name, Dir: h.Dir, State: state}
	}
	if reason, failed := strings.CutPrefix(said, "failed "); failed && err == nil {
		return fmt.Errorf("sshfleet: host %s: the clean-up command failed %s", h.Name, reason)
	}
	if err != nil || said != "gone" {
		return fmt.Errorf("sshfleet: host %s: cannot end the claim: %w", h.Name, unfinished(said, err))
	}
	return nil
}

// List returns all claims on a host. There is at most one, and those of whoever
// tries. A host is used if a claim was ever made there.
func (p *Pool) List(ctx context.Context, h *inventory.Host) (claims []Claim, used bool, err error) {
	said, err := p.talk(ctx, h, script(h, "", "list", nil), nil)
	lines := strings.Split(said, "\n")
	if err != nil || lines[len(lines)-1] != "end" {
		return nil, false, fmt.Errorf("sshfleet: host %s: cannot list the claims: %w", h.Name, unfinished(said, err))
	}
	if lines[0] == "unused" {
		return nil, false, nil
	}
	for _, line := range lines[:len(lines)-1] {
		token, rest, _ := strings.Cut(line, " ")
		state, about, _ := strings.Cut(rest, " ")
		c := Claim{Token: token, State: State(state)}
		if about != "" && json.Unmarshal([]byte(about), &c.About) != nil {
			c.About = About{}
		}
		claims = append(claims, c)
	}
	return claims, true, nil
}
