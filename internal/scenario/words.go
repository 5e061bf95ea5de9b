package scenario

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/swactor/provisioning"
)

// operations are the short forms of the language.
var operations = []struct {
	word string
	kind provisioning.OperationKind
}{
	{"create", provisioning.CreateLease},
	{"lookup", provisioning.LookupEndpoint},
	{"start", provisioning.StartBootstrap},
	{"converge", provisioning.BootstrapConvergenceObserved},
	{"cancel", provisioning.CancelBootstrap},
	{"destroy", provisioning.DestroyLease},
}

func parseOperation(word string) (provisioning.OperationKind, error) {
	var known []string
	for _, o := range operations {
		if o.word == word {
			return o.kind, nil
		}
		known = append(known, o.word)
	}
	return 0, wrong("an operation: "+strings.Join(known, ", "), quoted(word))
}

func operationWord(kind provisioning.OperationKind) string {
	for _, o := range operations {
		if o.kind == kind {
			return o.word
		}
	}
	return "none"
}

// slotPattern is how slots are named: a group, a hyphen, a number.
var slotPattern = regexp.MustCompile(`^.+-(0|[1-9][0-9]*)$`)

func parseSlot(word string) (provisioning.LogicalNodeID, error) {
	if !slotPattern.MatchString(word) {
		return "", wrong("a slot, like w-0", quoted(word))
	}
	return provisioning.LogicalNodeID(word), nil
}

// parseDuration wants a unit, also behind a zero.
func parseDuration(word string) (time.Duration, error) {
	d, err := time.ParseDuration(word)
	if err != nil || !strings.ContainsAny(word, "nuµmsh") {
		return 0, wrong("a duration with a unit, like 30s", quoted(word))
	}
	return d, nil
}

// parseCount reads an int; what lies beyond the platform's ints becomes the
// nearest of them.
func parseCount(word string) (int, error) {
	n, err := strconv.ParseInt(word, 10, 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		return 0, wrong("a whole number", quoted(word))
	}
	return int(min(max(n, math.MinInt), math.MaxInt)), nil
}

// parseNumber reads what cannot be negative: generations, attempts, failures.
func parseNumber(word string) (uint64, error) {
	n, err := strconv.ParseUint(word, 10, 64)
	if err != nil {
		return 0, wrong("a number from 0 to 18446744073709551615", quoted(word))
	}
	return n, nil
}

func parseFlag(word string) (bool, error) {
	if word != "true" && word != "false" {
		return false, wrong("true or false", quoted(word))
	}
	return word == "true", nil
}

// parseMoment reads "+4s" or "-2s" from now, or "none".
func parseMoment(word string) (left time.Duration, set bool, err error) {
	if word == "none" {
		return 0, false, nil
	}
	d, err := parseDuration(word)
	if err != nil || word[0] != '+' && word[0] != '-' {
		return 0, false, wrong("a time from now with sign and unit, like +4s, or none", quoted(word))
	}
	return d, true, nil
}

func momentWord(left time.Duration, set bool) string {
	switch {
	case !set:
		return "none"
	case left < 0:
		return left.String()
	}
	return "+" + left.String()
}

// parseAssignment splits "key=value".
func parseAssignment(word string) (key, value string, err error) {
	key, value, found := strings.Cut(word, "=")
	if !found || value == "" {
		return "", "", wrong("key=value", quoted(word))
	}
	return key, value, nil
}

// parseGroup reads "group:count@image". Whether the wish makes sense is for
// the library to say.
func parseGroup(word string) (provisioning.NodeGroupSpec, error) {
	name, rest, ok := strings.Cut(word, ":")
	text, image, hasImage := strings.Cut(rest, "@")
	if !ok || !hasImage || image == "" {
		return provisioning.NodeGroupSpec{}, wrong("group:count@image", quoted(word))
	}
	count, err := parseCount(text)
	if err != nil {
		return provisioning.NodeGroupSpec{}, err
	}
	return provisioning.NodeGroupSpec{
		GroupID: provisioning.NodeGroupID(name), Role: "worker", Provider: "fake", Count: count,
		Shape: provisioning.NodeShape{Image: image},
	}, nil
}

func parseShape(words []string) (provisioning.ClusterShape, error) {
	if len(words) == 0 {
		return provisioning.ClusterShape{}, wrong("a generation and groups, like 1 w:2@img1", "nothing")
	}
	generation, err := parseNumber(words[0])
	if err != nil {
		return provisioning.ClusterShape{}, err
	}
	shape := provisioning.ClusterShape{RunID: run, Generation: generation}
	for _, word := range words[1:] {
		g, err := parseGroup(word)
		if err != nil {
			return provisioning.ClusterShape{}, err
		}
		shape.Groups = append(shape.Groups, g)
	}
	return shape, nil
}

// run is the run of every scenario.
const run provisioning.RunID = "scenario"

func quoted(word string) string { return fmt.Sprintf("%q", word) }
