package provisioning

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Only a change that is allowed to lose the machines of running clusters may
// regenerate the vectors.
var updateGolden = flag.Bool("update", false, "rewrite the golden files in testdata")

var (
	tokenPattern = regexp.MustCompile(`^[a-z][a-z2-7]{26}$`)
	// RFC 1035 section 2.3.1, without its limit of 63 and without "--".
	namePattern = regexp.MustCompile(`^[a-z][a-z0-9]*(-[a-z0-9]+)*$`)
	// RFC 9562: version 8, variant 10.
	uuidPattern = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	// The values that Kubernetes, GCE and Hetzner all take.
	labelPattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9_]{0,61}[a-z0-9])?$`)
)

func TestSlotNamesAndOrder(t *testing.T) {
	require.Equal(t, LogicalNodeID("w-0"), NewLogicalNodeID("w", 0))
	require.Equal(t, LogicalNodeID("w-w-10"), NewLogicalNodeID("w-w", 10))

	type slot struct {
		group NodeGroupID
		index int
	}
	ordered := []slot{{"", 0}, {"a", 0}, {"a", 9}, {"a", 10}, {"a", 100}, {"a-1", 0}, {"b", 2}, {"b", 11}}
	for i, a := range ordered {
		for j, b := range ordered {
			require.Equal(t, cmp.Compare(i, j), CompareSlots(a.group, a.index, b.group, b.index), "%v against %v", a, b)
		}
	}
}

func TestOperationIDString(t *testing.T) {
	require.Equal(t, "0/0", OperationID{}.String())
	require.Equal(t, "18446744073709551615/7", OperationID{Attempt: math.MaxUint64, Sequence: 7}.String())
}

// keyVector is one pinned key with all its text forms.
type keyVector struct {
	Key      ExternalKey       `json:"key"`
	Token    string            `json:"token"`
	DiskFor  string            `json:"tokenForDisk"`
	UUID     string            `json:"uuid"`
	Name63   string            `json:"name63"`
	Name32   string            `json:"name32"`
	Labels   map[string]string `json:"labels"`
	RunToken string            `json:"runToken"`
}

func vectorOf(key ExternalKey) keyVector {
	return keyVector{
		Key: key, Token: key.Token(), DiskFor: key.TokenFor("disk"), UUID: key.UUID(),
		Name63: key.Name(63), Name32: key.Name(32), Labels: key.Labels("swactor-"), RunToken: RunToken(key.Run),
	}
}

// The text forms are frozen: whoever makes this test fail makes a running
// cluster lose its machines at the next upgrade.
func TestKeysGolden(t *testing.T) {
	keys := []ExternalKey{
		{},
		{Run: "r", Node: "w-0", Attempt: 1},
		{Run: "r", Node: "w-0", Attempt: 2},
		{Run: "r", Node: "w-1", Attempt: 1},
		{Run: "A", Node: "w-w-0", Attempt: 1},
		{Run: "A-w", Node: "w-0", Attempt: 1},
		{Run: "2026-11-30T10:00", Node: "GPU_Workers.eu-12", Attempt: 4096},
		{Run: "größe", Node: "ノード-3", Attempt: 7},
		{Run: RunID(strings.Repeat("r", MaxIDLength)), Node: LogicalNodeID(strings.Repeat("w", MaxIDLength) + "-1048575"), Attempt: math.MaxUint64},
	}
	path := filepath.Join("testdata", "keys.json")
	if *updateGolden {
		vectors := make([]keyVector, len(keys))
		for i, key := range keys {
			vectors[i] = vectorOf(key)
		}
		text, err := json.MarshalIndent(vectors, "", "  ")
		require.NoError(t, err)
		require.NoError(t, os.MkdirAll("testdata", 0o777))
		require.NoError(t, os.WriteFile(path, append(text, '\n'), 0o666))
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var pinned []keyVector
	require.NoError(t, json.Unmarshal(text, &pinned))
	require.Len(t, pinned, len(keys))
	for i, want := range pinned {
		require.Equal(t, keys[i], want.Key)
		require.Equal(t, want, vectorOf(want.Key))
	}
}

// A name is made of words that may run together; the token in it never does.
func TestKeysOfTwoRunsDiffer(t *testing.T) {
	a := ExternalKey{Run: "A", Node: NewLogicalNodeID("w-w", 0), Attempt: 1}
	b := ExternalKey{Run: "A-w", Node: NewLogicalNodeID("w", 0), Attempt: 1}
	require.Equal(t, string(a.Run)+"-"+string(a.Node), string(b.Run)+"-"+string(b.Node), "the case is only hard while these agree")

	require.NotEqual(t, a.Token(), b.Token())
	require.NotEqual(t, a.UUID(), b.UUID())
	require.NotEqual(t, a.Name(63), b.Name(63))
	require.NotEqual(t, a.TokenFor("disk"), b.TokenFor("disk"))
	require.NotEqual(t, RunToken(a.Run), RunToken(b.Run))
	for label, value := range a.Labels("") {
		if label != "attempt" {
			require.NotEqual(t, value, b.Labels("")[label], label)
		}
	}
}

func TestKeysFitProviderLimits(t *testing.T) {
	ids := map[int]string{60: strings.Repeat("0123456789ab-EFGHI.k", 3), 253: strings.Repeat("Ab-", 84) + "c"}
	seen := make(map[string]ExternalKey)
	unique := func(kind, text string, key ExternalKey) {
		other, twice := seen[kind+text]
		require.False(t, twice, "%s %q of %v is also that of %v", kind, text, key, other)
		seen[kind+text] = key
	}
	for _, length := range []int{60, 253} {
		require.Len(t, ids[length], length)
		for index := range 12 {
			for attempt := range NodeAttemptID(3) {
				key := ExternalKey{Run: RunID(ids[length]), Node: NewLogicalNodeID(NodeGroupID(ids[length]), index), Attempt: attempt + 1}
				require.Regexp(t, tokenPattern, key.Token())
				require.Equal(t, key.Token(), key.Token())
				unique("token", key.Token(), key)
				require.Regexp(t, uuidPattern, key.UUID())
				unique("uuid", key.UUID(), key)
				for _, limit := range []int{MinNameLength, 32, 63} {
					name := key.Name(limit)
					require.LessOrEqual(t, len(name), limit)
					require.Regexp(t, namePattern, name)
					require.Equal(t, name, key.Name(limit))
					unique(fmt.Sprint("name", limit), name, key)
				}
				labels := key.Labels("swactor-")
				require.ElementsMatch(t, []string{"swactor-run", "swactor-token", "swactor-name", "swactor-attempt"}, slices.Collect(maps.Keys(labels)))
				for label, value := range labels {
					require.Regexp(t, labelPattern, value, label)
				}
				require.Equal(t, key.Token(), labels["swactor-token"])
				require.Equal(t, key.Name(63), labels["swactor-name"])
				require.Equal(t, RunToken(key.Run), labels["swactor-run"])
				require.Equal(t, fmt.Sprint(attempt+1), labels["swactor-attempt"])
			}
		}
	}
}

func TestNameAtItsLimits(t *testing.T) {
	key := ExternalKey{Run: "run", Node: "w-10", Attempt: 3}
	for _, limit := range []int{math.MinInt, -1, 0, 1, MinNameLength - 1} {
		require.Empty(t, key.Name(limit), "%d", limit)
	}
	token := key.Token()
	for limit, want := range map[int]string{
		27: token, 28: token, // no room for a word and its hyphen
		29: "r-" + token, 31: "run-" + token,
		32: "run-" + token, // "run-" would end in a second hyphen
		33: "run-w-" + token, 36: "run-w-10-" + token, 37: "run-w-10-" + token,
		38: "run-w-10-3-" + token, 63: "run-w-10-3-" + token, math.MaxInt: "run-w-10-3-" + token,
	} {
		require.Equal(t, want, key.Name(limit), "%d", limit)
	}
}

func TestNameOfOddText(t *testing.T) {
	for _, c := range []struct{ run, node, words string }{
		{"", "", "n1"},
		{"9", "w-0", "n9-w-0-1"},
		{"--Run__X--", "..W..-0", "run-x-w-0-1"},
		{"größe", "ノード-3", "gr-e-3-1"}, // two bytes each, one hyphen for all of a run
		{"a\x00b", "\xff-0", "a-b-0-1"},
	} {
		key := ExternalKey{Run: RunID(c.run), Node: LogicalNodeID(c.node), Attempt: 1}
		require.Equal(t, c.words+"-"+key.Token(), key.Name(63))
	}
}

func TestTokensOfSideResources(t *testing.T) {
	key := ExternalKey{Run: "run", Node: "w-0", Attempt: 1}
	tokens := []string{key.Token(), RunToken(key.Run), RunToken(""), key.TokenFor(""), key.TokenFor("key"),
		key.TokenFor("run"), key.TokenFor("disk"), key.TokenFor("disk2"), ExternalKey{Run: "run"}.Token()}
	for _, token := range tokens {
		require.Regexp(t, tokenPattern, token)
		require.Len(t, token, TokenLength)
	}
	slices.Sort(tokens)
	require.Len(t, slices.Compact(tokens), 9, "each is its own")
}

// Token and UUID are two spellings of one hash, so a provider's record under
// one can be found from the other.
func TestUUIDIsTheHashOfTheToken(t *testing.T) {
	key := ExternalKey{Run: "run", Node: "w-0", Attempt: 1}
	fromUUID, err := hex.DecodeString(strings.ReplaceAll(key.UUID(), "-", ""))
	require.NoError(t, err)
	fromToken, err := tokenEncoding.DecodeString(strings.ToUpper(key.Token()[1:] + "aaaaaa")) // to whole groups of 8
	require.NoError(t, err)
	fromToken[6] = fromToken[6]&0x0f | 0x80
	fromToken[8] = fromToken[8]&0x3f | 0x80
	require.Equal(t, fromUUID, fromToken[:16])
}

func TestLabelsBelongToTheCaller(t *testing.T) {
	key := ExternalKey{Run: "run", Node: "w-0", Attempt: 1}
	labels := key.Labels("p.")
	clear(labels)
	require.Len(t, key.Labels("p."), 4)
}

// drawKeyText draws texts that run into each other when they are joined.
func drawKeyText(t *rapid.T, label string) string {
	return strings.Join(rapid.SliceOfN(rapid.SampledFrom([]string{"a", "-", "A", "0", "1", "\x00", "ä"}), 0, 4).Draw(t, label), "")
}

func drawKey(t *rapid.T, label string) ExternalKey {
	return ExternalKey{
		Run:     RunID(drawKeyText(t, label+" run")),
		Node:    LogicalNodeID(drawKeyText(t, label+" node")),
		Attempt: NodeAttemptID(rapid.OneOf(rapid.Uint64Range(0, 2), rapid.Uint64()).Draw(t, label+" attempt")),
	}
}

func TestProp_KeysInjective(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := drawKey(t, "a"), drawKey(t, "b")
		if rapid.Bool().Draw(t, "same") {
			b = a
		}
		purposeA, purposeB := drawKeyText(t, "purpose a"), drawKeyText(t, "purpose b")
		require.Equal(t, a == b, a.Token() == b.Token())
		require.Equal(t, a == b, a.UUID() == b.UUID())
		for _, limit := range []int{MinNameLength, 32, 63, 1000} {
			require.Equal(t, a == b, a.Name(limit) == b.Name(limit))
		}
		require.Equal(t, a.Run == b.Run, RunToken(a.Run) == RunToken(b.Run))
		require.Equal(t, a == b && purposeA == purposeB, a.TokenFor(purposeA) == b.TokenFor(purposeB))
		require.NotEqual(t, a.Token(), b.TokenFor(purposeB))
		require.NotEqual(t, a.Token(), RunToken(b.Run))
	})
}

func TestProp_SlotNamesInjective(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		group := rapid.Custom(func(t *rapid.T) string {
			return strings.Join(rapid.SliceOfN(rapid.SampledFrom([]string{"w", "-", "0", "1"}), 1, 5).Draw(t, "parts"), "")
		})
		a, b := NodeGroupID(group.Draw(t, "a")), NodeGroupID(group.Draw(t, "b"))
		i, j := rapid.IntRange(0, 111).Draw(t, "i"), rapid.IntRange(0, 111).Draw(t, "j")
		require.Equal(t, a == b && i == j, NewLogicalNodeID(a, i) == NewLogicalNodeID(b, j))
		require.Equal(t, a == b && i == j, CompareSlots(a, i, b, j) == 0)
		require.Equal(t, CompareSlots(a, i, b, j), -CompareSlots(b, j, a, i))
	})
}

// checkName holds a name to what Name promises for any key and limit.
func checkName(t require.TestingT, key ExternalKey, limit int) {
	name := key.Name(limit)
	if limit < MinNameLength {
		require.Empty(t, name)
		return
	}
	require.LessOrEqual(t, len(name), limit)
	require.Regexp(t, namePattern, name)
	require.True(t, strings.HasSuffix(name, key.Token()), "%q lost its token", name)
	words := strings.TrimSuffix(strings.TrimSuffix(name, key.Token()), "-")
	require.True(t, strings.HasPrefix(key.Name(math.MaxInt), words), "%q is no cut of the whole name", name)
}

// A name is taken apart into what it was made of, and what was not made by
// NewLogicalNodeID is no name.
func TestProp_SlotNamesComeApart(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		group := NodeGroupID(rapid.OneOf(rapid.StringMatching(`[a-z0-9-]{0,8}`), rapid.String()).Draw(t, "group"))
		index := rapid.OneOf(rapid.IntRange(0, 20), rapid.IntRange(0, maxIndex-1)).Draw(t, "index")
		gotGroup, gotIndex, ok := NewLogicalNodeID(group, index).split()
		require.True(t, ok)
		require.Equal(t, group, gotGroup)
		require.Equal(t, index, gotIndex)

		id := LogicalNodeID(rapid.OneOf(rapid.StringMatching(`[a-z0-9-]{0,4}-[-+_ 0-9]{0,9}`), rapid.String()).Draw(t, "id"))
		if group, index, ok := id.split(); ok {
			require.Equal(t, id, NewLogicalNodeID(group, index))
			require.Less(t, index, maxIndex)
		}
	})
}

func TestNamesThatAreNone(t *testing.T) {
	for _, id := range []LogicalNodeID{"", "w", "7", "-", "w-", "w-x", "w-00", "w-07", "w-+7", "w- 7", "w-7 ", "w-1_0", "w-16777216",
		"w-99999999", "w-100000000", "w-18446744073709551616", "w-/", "w-:", "w-1/", "w-１"} {
		_, _, ok := id.split()
		require.False(t, ok, "%q", id)
	}
	group, index, ok := LogicalNodeID("w-16777215").split()
	require.True(t, ok)
	require.Equal(t, NodeGroupID("w"), group)
	require.Equal(t, maxIndex-1, index)
	group, index, ok = LogicalNodeID("-0").split()
	require.True(t, ok)
	require.Empty(t, group)
	require.Zero(t, index)
}

func TestNameKeepsLettersAndDigits(t *testing.T) {
	const letters = "abcdefghijklmnopqrstuvwxyz"
	key := ExternalKey{Run: RunID(strings.ToUpper(letters)), Node: letters + "-0123456789", Attempt: 1}
	require.Equal(t, letters+"-"+letters+"-0123456789-1-"+key.Token(), key.Name(200))
}

func TestProp_NameIsAnRFC1035Label(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		key := ExternalKey{
			Run:     RunID(rapid.String().Draw(t, "run")),
			Node:    LogicalNodeID(rapid.SliceOf(rapid.Byte()).Draw(t, "node")),
			Attempt: NodeAttemptID(rapid.Uint64().Draw(t, "attempt")),
		}
		checkName(t, key, rapid.IntRange(0, 80).Draw(t, "limit"))
	})
}

func FuzzName(f *testing.F) {
	f.Add("run", "w-0", uint64(1), 63)
	f.Add("9--", "-\xff-", uint64(0), 28)
	f.Add("", "", uint64(math.MaxUint64), 27)
	f.Add(strings.Repeat("Run_", 60), "w-10", uint64(3), 0)
	f.Fuzz(func(t *testing.T, run, node string, attempt uint64, limit int) {
		key := ExternalKey{Run: RunID(run), Node: LogicalNodeID(node), Attempt: NodeAttemptID(attempt)}
		checkName(t, key, limit)
		for _, value := range key.Labels("") {
			require.Regexp(t, labelPattern, value)
		}
	})
}
