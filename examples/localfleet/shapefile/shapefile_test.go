package shapefile

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

const everything = `
groups:
  - groupId: gpu
    role: trainer
    count: 2
    provider: process
    shape:
      image: 1.10
      diskGB: 200
      gpuName: A100
      minGPURAMMB: 40960
      minDownMbps: 200.5
      minUpMbps: 1e2
      minReliability: 0.95
      requireVerified: true
      providerLabels: {zone: 007, spot: true}
    boot:
      sshUser: root
      verifyCommands: [test -d ., "true"]
      startSwactorCommand: localfleet agent
      stdoutSources: [a.log]
      stderrSources: [b.log]
      env: {YES: yes, EMPTY: ""}
      args: [-v, 5]
      mounts: [{source: /a, target: /b, readOnly: true}]
    swarmJoin:
      orchSwactorAddr: "127.0.0.1:7000"
      joinTokenRef: file:token
  - groupId: empty
    count: 0
`

func number(f float64) *float64 { return &f }

// Every field of the library can be written, and none is read as something else
// than it says: a number where a text is meant counts as it is written.
func TestEveryFieldIsRead(t *testing.T) {
	groups, err := Parse("fleet.yaml", []byte(everything))
	require.NoError(t, err)
	require.Equal(t, []provisioning.NodeGroupSpec{{
		GroupID: "gpu", Role: "trainer", Count: 2, Provider: "process",
		Shape: provisioning.NodeShape{
			Image: "1.10", DiskGB: 200, GPUName: "A100", MinGPURAMMB: number(40960), MinDownMbps: number(200.5),
			MinUpMbps: number(100), MinReliability: number(0.95), RequireVerified: true,
			ProviderLabels: map[string]string{"zone": "007", "spot": "true"},
		},
		Boot: provisioning.BootSpec{
			SSHUser: "root", VerifyCommands: []string{"test -d .", "true"}, StartSwactorCommand: "localfleet agent",
			StdoutSources: []string{"a.log"}, StderrSources: []string{"b.log"},
			Env: map[string]string{"YES": "yes", "EMPTY": ""}, Args: []string{"-v", "5"},
			Mounts: []provisioning.Mount{{Source: "/a", Target: "/b", ReadOnly: true}},
		},
		SwarmJoin: provisioning.SwarmJoinTemplate{OrchSwactorAddr: "127.0.0.1:7000", JoinTokenRef: "file:token"},
	}, {GroupID: "empty"}}, groups)
	// A field that the library gains must be added above.
	requireAllSet(t, reflect.ValueOf(groups[0]), "group", map[string]bool{"group.RunID": true})
}

func requireAllSet(t *testing.T, v reflect.Value, name string, except map[string]bool) {
	if v.Kind() == reflect.Struct {
		for i := range v.NumField() {
			requireAllSet(t, v.Field(i), name+"."+v.Type().Field(i).Name, except)
		}
		return
	}
	require.True(t, except[name] || !v.IsZero(), "%s is not in the test", name)
}

// A file of JSON is judged by the same rules, also where JSON and YAML differ.
func TestJSON(t *testing.T) {
	groups, err := Parse("fleet.json", []byte("{\"groups\":\n\t[{\"groupId\": \"\\ud83d\\ude00\\u00e9\", \"count\": 1, \"shape\": {\"image\": \"a:1\", \"minUpMbps\": 1.5e1}}]}\n"))
	require.NoError(t, err)
	require.Equal(t, []provisioning.NodeGroupSpec{{GroupID: "😀é", Count: 1,
		Shape: provisioning.NodeShape{Image: "a:1", MinUpMbps: number(15)}}}, groups)
}

func TestFaultsNameTheirLine(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		// What a hurried person writes.
		{"f.yaml", "groups:\n- groupId: a\n  Count: 2\n", "f.yaml:2: groups[0].count: is missing; write 0 for an empty group\nf.yaml:3: groups[0].Count: is not a known field; \"count\" is"},
		{"f.yaml", "groups:\n- groupId: a\n  count: 1\n  shape: {img: x}\n", "f.yaml:4: groups[0].shape.img: is not a known field"},
		{"f.yaml", "groups:\n- groupId: a\n  count: 2\n  count: 3\n", "f.yaml:4: groups[0].count: is there twice, first in line 3"},
		{"f.yaml", "groups:\n- groupId: a\n  count: 1\n  boot: {env: {a: b, a: c}}\n", "f.yaml:4: groups[0].boot.env.a: is there twice, first in line 4"},
		{"f.yaml", "groups:\n- count: 1\n", "f.yaml:2: groups[0].groupId: is missing"},
		// A count that was cut short must not become another count.
		{"f.yaml", "groups:\n- groupId: a\n  count: 2.5\n", "f.yaml:3: groups[0].count: is \"2.5\", must be a whole number of at most 64 bits"},
		{"f.yaml", "groups:\n- groupId: a\n  count: \"2\"\n", "f.yaml:3: groups[0].count: is \"2\", must be a whole number of at most 64 bits"},
		{"f.yaml", "groups:\n- groupId: a\n  count:\n", "f.yaml:3: groups[0].count: is null, must be a whole number of at most 64 bits"},
		{"f.yaml", "groups:\n- groupId: a\n  count: 99999999999999999999\n", "f.yaml:3: groups[0].count: is \"99999999999999999999\", must be a whole number of at most 64 bits"},
		{"f.yaml", "groups:\n- groupId: a\n  count: -1\n", "f.yaml:3: groups[0].count: is -1, must not be negative"},
		{"f.yaml", "groups:\n- groupId: a\n  count: 1000000000\n", "f.yaml:1: groups: hold more than 256 slots in all"},
		// An empty file is an accident, not a wish for nothing.
		{"f.yaml", "", "f.yaml: the file is empty; write groups: [] to wish for nothing"},
		{"f.yaml", "# nothing\n", "f.yaml: the file is empty; write groups: [] to wish for nothing"},
		{"f.yaml", "groups:\n", "f.yaml:1: groups: is null, must be a list"},
		{"f.yaml", "{}\n", "f.yaml:1: groups: is missing; write [] for none"},
		{"f.yaml", "null\n", "f.yaml:1: is null, must be a mapping\nf.yaml:1: groups: is missing; write [] for none"},
		{"f.yaml", "groups: []\n---\ngroups: []\n", "f.yaml:2: a second document follows"},
		{"f.yaml", "groups: []\nrunId: x\n", "f.yaml:2: runId: is not a known field"},
		{"f.yaml", "groups:\n- groupId: a\n  count: 1\n  runId: x\n", "f.yaml:4: groups[0].runId: the run is chosen by whoever runs the fleet"},
		{"f.yaml", "groups:\n- groupId: a\n\tcount: 1\n", "f.yaml:2: found a tab character that violates indentation"},
		{"f.yaml", "groups: 'x\n", "f.yaml:2: found unexpected end of stream"},
		{"f.yaml", "groups: &x [*x]\n", "f.yaml:1: groups[0]: is a list, must be a mapping\nf.yaml:1: groups[0].groupId: is missing\nf.yaml:1: groups[0].count: is missing; write 0 for an empty group"},
		{"f.yaml", "groups:\n- &g {groupId: a, count: 1}\n- {<<: *g}\n", "f.yaml:3: groups[1]: a key is \"<<\", must be a text\nf.yaml:3: groups[1].groupId: is missing\nf.yaml:3: groups[1].count: is missing; write 0 for an empty group"},
		{"f.yaml", "groups:\n- groupId: a\n  count: 1\n  shape: {image: }\n", "f.yaml:4: groups[0].shape.image: is null, must be a text"},
		{"f.yaml", "groups:\n- groupId: a\n  count: 1\n  shape: {requireVerified: maybe, minUpMbps: fast, diskGB: [1], providerLabels: x}\n",
			"f.yaml:4: groups[0].shape.requireVerified: is \"maybe\", must be true or false\nf.yaml:4: groups[0].shape.minUpMbps: is \"fast\", must be a finite number\nf.yaml:4: groups[0].shape.diskGB: is a list, must be a whole number of at most 64 bits\nf.yaml:4: groups[0].shape.providerLabels: is \"x\", must be a mapping"},
		{"f.yaml", "groups:\n- groupId: a\n  count: 1\n  shape: {minUpMbps: 1e400}\n", "f.yaml:4: groups[0].shape.minUpMbps: is \"1e400\", must be a finite number"},
		// What only the library knows still names its line.
		{"f.yaml", "groups:\n- groupId: a\n  count: 1\n  shape:\n    minReliability: .nan\n- groupId: a\n  count: 1\n", "f.yaml:5: groups[0].shape.minReliability: is NaN, must be a finite number\nf.yaml:6: groups[1].groupId: is also the name of groups[0]"},
		{"f.yaml", "groups:\n- groupId: a/b\n  count: 1\n", "f.yaml:2: groups[0].groupId: must not hold '/'"},

		{"f.json", "", "f.json: the file is empty; write groups: [] to wish for nothing"},
		{"f.json", "{\"groups\": [{\"groupId\": \"a\",\n\"count\": 1, \"count\": 2}]}", "f.json:2: groups[0].count: is there twice, first in line 2"},
		{"f.json", "{\"groups\": [{\"groupId\": \"a\", \"Count\": 1, \"count\": 1}]}", "f.json:1: groups[0].Count: is not a known field; \"count\" is"},
		{"f.json", "{\"groups\": []} x", "f.json:1: something follows the shape"},
		{"f.json", "{\"groups\": [\n", "f.json:1: unexpected EOF"},
		{"f.json", "{\"groups\":\n[}", "f.json:2: invalid character '}' looking for beginning of value"},
		{"f.json", "{\"groups\": [{\"groupId\": \"a\", \"count\": 1.0}]}", "f.json:1: groups[0].count: is \"1.0\", must be a whole number of at most 64 bits"},
		{"f.json", "groups: []\n", "f.json:1: invalid character 'g' looking for beginning of value"},
		{"f.json", "\xff", "f.json: the file is not UTF-8"},
	} {
		groups, err := Parse(c.name, []byte(c.text))
		require.ErrorIs(t, err, ErrInvalid, "%s %q", c.name, c.text)
		require.EqualError(t, err, c.want, "%s %q", c.name, c.text)
		require.Nil(t, groups)
	}
}

func TestManyFaultsAreCutShort(t *testing.T) {
	_, err := Parse("f.yaml", []byte("groups: ["+strings.Repeat("x,", 1000)+"]"))
	require.ErrorIs(t, err, ErrInvalid)
	require.Len(t, strings.Split(err.Error(), "\n"), maxFaults+1)
}

func TestHugeFileIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f.yaml")
	write(t, path, strings.Repeat("#", MaxSize+1))
	_, err := Read(path)
	require.EqualError(t, err, path+": is larger than 1048576 bytes")
	write(t, path, "groups: []\n"+strings.Repeat("#", MaxSize-20))
	_, err = Read(path)
	require.NoError(t, err)
}

func FuzzParse(f *testing.F) {
	f.Add("f.yaml", everything)
	f.Add("f.yaml", "a: &a [*a]\ngroups: *a")
	f.Add("f.json", `{"groups": [{"groupId": "a", "count": 1}]}`)
	f.Fuzz(func(t *testing.T, name, text string) {
		groups, err := Parse(name, []byte(text))
		if err != nil {
			require.ErrorIs(t, err, ErrInvalid)
			return
		}
		require.NoError(t, provisioning.ClusterShape{RunID: "r", Generation: 1, Groups: groups}.Validate())
	})
}

func write(t *testing.T, path, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}

func counting(n int) string { return fmt.Sprintf("groups:\n- groupId: a\n  count: %d\n", n) }

// look returns what a look has found: the count of the first group, -1 if
// nothing has changed.
func look(t *testing.T, w *Watcher) int {
	t.Helper()
	groups, changed, err := w.Look()
	require.NoError(t, err)
	if !changed {
		require.Nil(t, groups)
		return -1
	}
	return groups[0].Count
}

func TestWatchTellsOfAChangeOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	write(t, path, counting(1))
	w, groups, err := Watch(path)
	require.NoError(t, err)
	require.Equal(t, 1, groups[0].Count)
	require.Equal(t, -1, look(t, w))

	write(t, path, counting(2))
	require.Equal(t, -1, look(t, w), "half a file may be a whole one that says less")
	require.Equal(t, 2, look(t, w))
	require.Equal(t, -1, look(t, w))

	// An editor that writes beside the file and renames.
	write(t, path+".new", counting(3))
	require.NoError(t, os.Rename(path+".new", path))
	require.Equal(t, -1, look(t, w))
	require.Equal(t, 3, look(t, w))
}

// A file that is written in two goes is not believed in between, although its
// first half is a lawful file.
func TestWatchDoesNotBelieveHalfAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	whole := counting(4) + "- groupId: b\n  count: 2\n"
	write(t, path, whole)
	w, _, err := Watch(path)
	require.NoError(t, err)
	for range 3 {
		write(t, path, counting(4)) // b is not written yet
		require.Equal(t, -1, look(t, w))
		write(t, path, whole)
		require.Equal(t, -1, look(t, w))
	}
	require.Equal(t, -1, look(t, w))
}

func TestWatchComplainsOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	write(t, path, counting(1))
	w, _, err := Watch(path)
	require.NoError(t, err)
	quiet := func() { require.Equal(t, -1, look(t, w)) }

	write(t, path, "groups:\n- groupId: a\n  cuont: 2\n")
	quiet()
	_, changed, err := w.Look()
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "fleet.yaml:3: groups[0].cuont: is not a known field")
	require.False(t, changed)
	quiet()
	quiet()

	// Put right by going back to what it was.
	write(t, path, counting(1))
	quiet()
	require.Equal(t, 1, look(t, w))
	quiet()

	require.NoError(t, os.Remove(path))
	_, changed, err = w.Look()
	require.ErrorIs(t, err, os.ErrNotExist)
	require.False(t, changed)
	quiet()
	write(t, path, counting(1))
	quiet()
	require.Equal(t, 1, look(t, w), "it is back, which is worth a word")
	quiet()
}

func TestWatchRefusesABadStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	_, _, err := Watch(path)
	require.ErrorIs(t, err, os.ErrNotExist)
	write(t, path, "groups: 5")
	_, _, err = Watch(path)
	require.ErrorIs(t, err, ErrInvalid)
}
