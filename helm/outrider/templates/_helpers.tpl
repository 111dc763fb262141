{{/* Names. Kept so short that everything made of them stays within Kubernetes' limits; a RayCluster's is 53. */}}
{{- define "outrider.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 38 | trimSuffix "-" -}}
{{- end }}

{{- define "outrider.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $base := include "outrider.name" . -}}
{{- $name = ternary .Release.Name (printf "%s-%s" .Release.Name $base) (contains $base .Release.Name) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]" $name) -}}
{{- fail (printf "the name %q must begin with a letter, as those of Services and RayClusters; set fullnameOverride or choose another release name." $name) -}}
{{- end -}}
{{- $name | trunc 38 | trimSuffix "-" -}}
{{- end }}

{{/* Labels that select pods of a component: never changed, as selectors cannot be. */}}
{{- define "outrider.selector" -}}
app.kubernetes.io/name: {{ include "outrider.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/* Labels of objects. Not of pods: a new version of the chart alone must not replace engines. */}}
{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Images have no default: they are built from a checkout. */}}
{{- define "outrider.image" -}}
{{- $image := ternary .root.Values.gateway.image .root.Values.image (eq .kind "gateway") -}}
{{- if not $image.repository -}}
{{- $value := ternary "gateway.image.repository" "image.repository" (eq .kind "gateway") -}}
{{- fail (printf "%s is not set; build the image and push it, then name it: docker build -f docker/%s.Dockerfile -t REGISTRY/outrider-%s:%s . && docker push REGISTRY/outrider-%s:%s, and --set %s=REGISTRY/outrider-%s" $value .kind .kind .root.Chart.AppVersion .kind .root.Chart.AppVersion $value .kind) -}}
{{- end -}}
{{- if eq (default "" $image.tag) "latest" -}}
{{- fail (printf "the tag of %s is latest, which is another image every day; name a version." $image.repository) -}}
{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end }}

{{- define "outrider.serviceAccount" -}}
{{- default (ternary (include "outrider.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end }}

{{/* Secrets: the one that is given, or the chart's own. */}}
{{- define "outrider.ownSecret" -}}
{{- printf "%s-secrets" (include "outrider.fullname" .) -}}
{{- end }}

{{- define "outrider.linkSecret" -}}
{{- default (include "outrider.ownSecret" .) .Values.link.existingSecret -}}
{{- end }}

{{- define "outrider.raySecret" -}}
{{- default (include "outrider.ownSecret" .) .Values.ray.existingSecret -}}
{{- end }}

{{- define "outrider.hubSecret" -}}
{{- if .Values.hub.existingSecret -}}
{{- .Values.hub.existingSecret -}}
{{- else if .Values.hub.token -}}
{{- include "outrider.ownSecret" . -}}
{{- end -}}
{{- end }}

{{/* The Secret with the one key that clients show; empty where there is none or a file of keys. */}}
{{- define "outrider.apiKeySecret" -}}
{{- if and .Values.auth.anonymous (or .Values.auth.existingSecret .Values.auth.keysSecret) -}}
{{- fail "auth.anonymous is true beside a Secret of keys; unset one of them." -}}
{{- end -}}
{{- if and .Values.auth.existingSecret .Values.auth.keysSecret -}}
{{- fail "auth.existingSecret and auth.keysSecret are both set; put the key into the file of keys." -}}
{{- end -}}
{{- if not (or .Values.auth.anonymous .Values.auth.keysSecret) -}}
{{- default (include "outrider.ownSecret" .) .Values.auth.existingSecret -}}
{{- end -}}
{{- end }}

{{- define "outrider.tlsSecret" -}}
{{- if .Values.tls.enabled -}}
{{- if not (or .Values.tls.existingSecret .Values.tls.certManager.enabled) -}}
{{- fail "tls.enabled is true but there is no certificate; set tls.existingSecret or tls.certManager." -}}
{{- end -}}
{{- default (printf "%s-tls" (include "outrider.fullname" .)) .Values.tls.existingSecret -}}
{{- end -}}
{{- end }}

{{/* The component that clients' Services select. */}}
{{- define "outrider.frontComponent" -}}
{{- ternary "server" "gateway" (eq .Values.mode "plain") -}}
{{- end }}

{{- define "outrider.gatewayService" -}}
{{- printf "%s-gateway" (include "outrider.fullname" .) -}}
{{- end }}

{{- define "outrider.controllersService" -}}
{{- printf "%s-controllers" (include "outrider.fullname" .) -}}
{{- end }}

{{- define "outrider.claim" -}}
{{- default (printf "%s-models" (include "outrider.fullname" .)) .Values.modelCache.existingClaim -}}
{{- end }}

{{/* Host names of the gateways, in certificates and for clients. */}}
{{- define "outrider.gatewayHost" -}}
{{- printf "%s.%s.svc" (include "outrider.gatewayService" .) .Release.Namespace -}}
{{- end }}

{{/* Whether `helm test` can send a request: it needs a key where a file has them, and has no certificate to show. */}}
{{- define "outrider.hasTest" -}}
{{- if and .Values.tests.enabled (or .Values.tests.apiKeySecret (not .Values.auth.keysSecret)) (not .Values.tls.clientCASecret) -}}true{{- end -}}
{{- end }}
