package main

import (
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

func readme(t *testing.T) string {
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	return string(text)
}

// The reference of the shape file names every field there is.
func TestReadmeNamesEveryField(t *testing.T) {
	text := readme(t)
	var walk func(reflect.Type, string)
	walk = func(typ reflect.Type, prefix string) {
		for i := range typ.NumField() {
			field := typ.Field(i)
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			switch {
			case prefix+name == "runId": // which a file may not name
			case field.Type.Kind() == reflect.Struct:
				walk(field.Type, prefix+name+".")
			default:
				require.Contains(t, text, "`"+prefix+name+"`")
			}
		}
	}
	walk(reflect.TypeFor[provisioning.NodeGroupSpec](), "")
}

// The metrics in the code and those in the README are the same, with their
// labels.
func TestReadmeNamesEveryMetric(t *testing.T) {
	code, err := os.ReadFile("status/metrics.go")
	require.NoError(t, err)
	labels := make(map[string]string)
	for _, found := range regexp.MustCompile(`m\.(?:family|single)\("(\w+)"`).FindAllStringSubmatch(string(code), -1) {
		labels["localfleet_"+found[1]] = ""
	}
	require.NotEmpty(t, labels)
	for _, found := range regexp.MustCompile(`m\.sample\("(\w+)", [^"\n]*((?:, "\w+", [^"\n]+)+)\)`).FindAllStringSubmatch(string(code), -1) {
		var names []string
		for _, label := range regexp.MustCompile(`"(\w+)", `).FindAllStringSubmatch(found[2], -1) {
			names = append(names, label[1])
		}
		labels["localfleet_"+found[1]] = "{" + strings.Join(names, ",") + "}"
	}
	labels["localfleet_observations_total"], labels["localfleet_reloads_total"] = "{result}", "{result}" // literal values
	documented := make(map[string]string)
	for _, found := range regexp.MustCompile("`(localfleet_\\w+)(\\{[a-z,]+\\})?`").FindAllStringSubmatch(readme(t), -1) {
		documented[found[1]] = found[2]
	}
	require.Equal(t, labels, documented)
}
